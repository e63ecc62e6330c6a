"""The sampler and its parameters against vLLM: every field of every row of every case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from golden_cases import cases

from minivllm.sampling.metadata import SamplingMetadata, SamplingRow
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler, apply_cuts, apply_masks_and_penalties, gather_logprobs

# Units of 1e-6, as the file asks: float32 sums of other orders differ in the last digit.
TOLERANCE = 6
FAMILIES = {
    "temperature", "top_k", "top_k_ties", "top_p", "min_p", "top_k_top_p", "min_p_top_k_top_p", "repetition",
    "presence_frequency", "all_penalties", "logit_bias", "bad_words", "allowed", "min_tokens", "everything",
    "logprobs", "mixed_batch", "params_validation",
}  # fmt: skip
NUMBERS = {
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
}  # fmt: skip


def make_params(given: dict[str, Any]) -> SamplingParams:
    """SamplingParams of a row; what only the engine knows is given to `resolve`, as the engine does."""
    settings = {key: float(value) if key in NUMBERS else value for key, value in given.items()}
    if "logit_bias" in settings:
        settings["logit_bias"] = {int(key): float(value) for key, value in settings["logit_bias"].items()}
    bad_words = settings.pop("bad_words_token_ids", [])
    eos = settings.pop("eos_token_id", None)
    params = SamplingParams(**settings)
    params = params.resolve(
        vocab_size=1 << 20, tokenizer=None, eos_token_ids=[] if eos is None else [eos], room=1 << 20
    )
    object.__setattr__(params, "bad_words_token_ids", tuple(map(tuple, bad_words)))  # given as ids, not as text
    return params


def micro(values: torch.Tensor) -> list[int | None]:
    """Units of 1e-6, None for -inf."""
    return [None if value == -torch.inf else round(value * 1e6) for value in values.tolist()]


def close(ours: list[int | None], theirs: list[int | None]) -> bool:
    if [value is None for value in ours] != [value is None for value in theirs]:
        return False
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if a is not None and b is not None]
    # Values beyond 1 carry float32's relative error.
    return all(abs(a - b) <= TOLERANCE * max(1, abs(b) // 10**6) for a, b in pairs)


@pytest.mark.parametrize("case", cases("sampler"))
def test_sampler(case: dict[str, Any]) -> None:
    assert case["family"] in FAMILIES, f"unknown family {case['family']}"
    if case["family"] == "params_validation":
        for check in case["checks"]:
            validate(check)
        return
    rows = case["rows"]
    params = [make_params(row["params"]) for row in rows]
    for row, each in zip(rows, params, strict=True):
        effective = row["effective"]
        assert each.temperature == float(effective["temperature"])
        assert (each.top_k, each.top_p, each.min_p) == (
            effective["top_k"], float(effective["top_p"]), float(effective["min_p"]),
        )  # fmt: skip
        assert sorted(each.all_stop_token_ids) == effective["all_stop_token_ids"]
        assert set(effective) == {"temperature", "top_k", "top_p", "min_p", "all_stop_token_ids"}

    raw = torch.tensor([row["logits_x8"] for row in rows], dtype=torch.float32) / 8
    metadata = SamplingMetadata.from_rows(
        [
            SamplingRow(params=p, prompt_token_ids=row["prompt"], output_token_ids=list(row["output"]))
            for p, row in zip(params, rows, strict=True)
        ],
        case["vocab_size"],
        "cpu",
    )
    penalised = apply_masks_and_penalties(raw.clone(), metadata)
    drawing = [index for index, each in enumerate(params) if not each.greedy]
    processed = penalised.clone()
    if drawing:
        processed[drawing] = apply_cuts(penalised[drawing], metadata)
    tokens = torch.tensor([row["result"].get("logprobs", {}).get("sampled_token", 0) for row in rows])
    values = raw if case["logprobs_mode"].startswith("raw") else processed
    if case["logprobs_mode"].endswith("logprobs"):
        values = values.log_softmax(-1)
    found = gather_logprobs(values, metadata.max_num_logprobs or 0, tokens)
    output = Sampler(logprobs_mode=case["logprobs_mode"])(raw, metadata)

    for index, row in enumerate(rows):
        result = row["result"]
        assert set(result) <= {"after_penalties_x1e6", "argmax", "greedy", "survivors", "probs_x1e6", "logprobs"}
        assert close(micro(penalised[index]), result["after_penalties_x1e6"])
        assert int(penalised[index].argmax()) == result["argmax"]
        assert params[index].greedy == result["greedy"]
        if result["greedy"]:
            assert int(output.sampled_token_ids[index]) == result["argmax"]
        else:
            alive = (processed[index] > -torch.inf).nonzero().flatten()
            assert alive.tolist() == result["survivors"]
            assert close(micro(processed[index].softmax(-1)[alive]), result["probs_x1e6"])
            assert int(output.sampled_token_ids[index]) in result["survivors"]
        if "logprobs" in result:
            check_logprobs(result["logprobs"], found, index, metadata, params[index])
        else:
            assert params[index].logprobs is None


def check_logprobs(
    wanted: dict[str, Any], found: Any, index: int, metadata: SamplingMetadata, params: SamplingParams
) -> None:
    assert set(wanted) == {
        "num", "batch_num", "sampled_token", "token_ids", "values_x1e6", "rank", "num_minus_inf_dropped",
    }  # fmt: skip
    assert params.logprobs == wanted["num"]
    assert metadata.max_num_logprobs == wanted["batch_num"]
    count = 1 + (metadata.vocab_size if wanted["num"] == -1 else wanted["num"])
    ids, values = found.token_ids[index, :count], found.values[index, :count]
    finite = values > -torch.inf
    assert ids[finite].tolist() == wanted["token_ids"]
    assert close(micro(values[finite]), wanted["values_x1e6"])
    assert int((~finite).sum()) == wanted["num_minus_inf_dropped"]
    assert int(found.ranks[index]) == wanted["rank"]
    entry = found.to_dicts([params.logprobs if i == index else None for i in range(len(metadata.rows))])[index]
    assert next(iter(entry)) == wanted["sampled_token"]
    assert entry[wanted["sampled_token"]].rank == wanted["rank"]


def validate(check: dict[str, Any]) -> None:
    kwargs = {key: float(value) if key in NUMBERS else value for key, value in check["kwargs"].items()}
    if not check["accepted"]:
        assert check["error"] in ("VLLMValidationError", "ValueError", "TypeError")
        with pytest.raises((ValueError, TypeError)) as caught:
            SamplingParams(**kwargs)
        # vLLM appends (parameter=..., value=...) to some messages, we the value to those that lack it.
        ours, theirs = str(caught.value), check["message"].split(" (parameter=")[0]
        assert ours.startswith(theirs) or theirs.startswith(ours)
        return
    params = SamplingParams(**kwargs)
    assert set(check) == {"kwargs", "accepted", "temperature", "top_k", "top_p", "min_p", "stop_token_ids"}
    assert (params.temperature, params.top_p, params.min_p) == tuple(
        float(check[key]) for key in ("temperature", "top_p", "min_p")
    )
    assert params.top_k == check["top_k"]
    assert list(params.stop_token_ids or ()) == check["stop_token_ids"]
