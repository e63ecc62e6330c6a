"""The sampler: against a plain-Python account of vLLM's order, its distribution, its seeds, its logprobs."""

from __future__ import annotations

import math
import random
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from minivllm.sampling.metadata import SamplingMetadata, SamplingRow
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import LogprobsMode, Sampler, SamplerOutput, _pick, apply_cuts, gather_logprobs


def make_row(prompt: list[int] | None = None, output: list[int] | None = None, **settings: Any) -> SamplingRow:
    bad_words = settings.pop("bad_words_token_ids", ())
    params = SamplingParams(**settings).resolve(vocab_size=1 << 20, tokenizer=None, eos_token_ids=[0], room=99)
    object.__setattr__(params, "bad_words_token_ids", bad_words)  # given as ids, not as text
    generator = None if params.seed is None else torch.Generator().manual_seed(params.seed)
    return SamplingRow(
        params=params,
        prompt_token_ids=prompt or [1],
        output_token_ids=[] if output is None else output,
        generator=generator,
    )


def sample(logits: Tensor, rows: list[SamplingRow], sampler: Sampler | None = None) -> SamplerOutput:
    return (sampler or Sampler())(logits, SamplingMetadata.from_rows(rows, logits.shape[1], "cpu"))


def reference(logits: list[float], row: SamplingRow) -> tuple[list[float], dict[int, float]]:
    """(logits after penalties, probability of each token that may be drawn), one token at a time."""
    params, prompt, output = row.params, list(row.prompt_token_ids), row.output_token_ids
    x = list(logits)
    for token in range(len(x)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            x[token] = -math.inf
    for *before, last in params.bad_words_token_ids:
        if before == output[len(output) - len(before) :]:
            x[last] = -math.inf
    if len(output) < params.min_tokens:
        for token in params.all_stop_token_ids:
            x[token] = -math.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    if params.greedy:
        return x, {}
    alive = {token: value / params.temperature for token, value in enumerate(x) if value > -math.inf}
    top = max(alive.values())
    alive = {token: value for token, value in alive.items() if math.exp(value - top) >= params.min_p}
    if 0 < params.top_k < len(alive):
        kth = sorted(alive.values())[-params.top_k]
        alive = {token: value for token, value in alive.items() if value >= kth}
    whole = sum(math.exp(value - top) for value in alive.values())
    probs = {token: math.exp(value - top) / whole for token, value in alive.items()}
    gathered, kept = 0.0, {}
    for token, p in sorted(probs.items(), key=lambda item: -item[1]):
        if gathered >= params.top_p < 1 and kept:
            break
        kept[token] = p
        gathered += p
    return x, {token: p / gathered for token, p in kept.items()}


def random_settings(rng: random.Random, vocab: int) -> dict[str, Any]:
    settings: dict[str, Any] = {"temperature": rng.choice([0.0, 0.3, 1.0, 1.7])}
    options: dict[str, Any] = {
        "top_k": rng.randint(1, 2 * vocab), "top_p": rng.uniform(0.05, 1), "min_p": rng.uniform(0, 0.5),
        "repetition_penalty": rng.uniform(0.5, 2), "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2), "min_tokens": rng.randint(0, 6), "logprobs": rng.randint(0, 5),
        "allowed_token_ids": [*rng.sample(range(vocab), vocab // 2), 5],
        "logit_bias": {rng.randrange(vocab): rng.uniform(-9, 9) for _ in range(3)},
        "bad_words_token_ids": tuple(tuple(rng.choices(range(1, 5), k=rng.randint(1, 2))) for _ in range(3)),
        "stop_token_ids": [rng.randrange(6, vocab)],
    }  # fmt: skip
    return settings | {name: value for name, value in options.items() if rng.random() < 0.3}


@pytest.mark.parametrize("seed", range(25))
def test_batches_of_everything_against_plain_python(seed: int) -> None:
    rng = random.Random(seed)
    vocab, n = rng.choice([12, 40, 300, 700]), rng.randint(1, 12)
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed)) * 3
    rows = [
        make_row(
            rng.choices(range(1, vocab), k=rng.randint(1, 9)), rng.choices(range(1, 5), k=rng.randint(0, 6)),
            **random_settings(rng, vocab),
        )
        for _ in range(n)
    ]  # fmt: skip
    before = logits.clone()
    sampler = Sampler(seed=seed, logprobs_mode="processed_logits")
    for row in rows:
        object.__setattr__(row.params, "logprobs", -1)  # shows the whole distribution
    output = sample(logits, rows, sampler)
    assert torch.equal(logits, before), "the caller's logits were changed"
    assert output.logprobs is not None
    for index, row in enumerate(rows):
        penalised, probs = reference(logits[index].double().tolist(), row)
        token = int(output.sampled_token_ids[index])
        values = dict(
            zip(output.logprobs.token_ids[index].tolist(), output.logprobs.values[index].tolist(), strict=True)
        )
        if row.params.greedy:
            assert token == max(range(vocab), key=penalised.__getitem__)
            assert [values[t] for t in range(vocab)] == pytest.approx(penalised, rel=1e-5, abs=1e-5)
        else:
            assert token in probs
            assert {t for t, value in values.items() if value > -math.inf} == set(probs)
            ours = torch.tensor([values[t] for t in probs]).softmax(0).tolist()
            assert ours == pytest.approx(list(probs.values()), abs=1e-5)


def chi_square(counts: Tensor, probs: Tensor) -> tuple[float, float]:
    """(statistic, the value that a right sampler stays below 999 times in 1,000), rare tokens taken together."""
    expected = probs.double() * counts.sum()
    common = expected >= 10
    observed = torch.cat([counts[common].double(), counts[~common].double().sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    observed, expected = observed[expected > 0], expected[expected > 0]
    degrees = len(expected) - 1
    limit = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3  # Wilson and Hilferty
    return float(((observed - expected) ** 2 / expected).sum()), limit


@pytest.mark.parametrize(
    ("settings", "vocab"),
    [({}, 30), ({}, 600), ({"temperature": 0.6}, 600), ({"top_k": 20}, 600), ({"top_p": 0.8, "min_p": 0.01}, 300)],
    ids=str,
)
def test_distribution(settings: dict[str, Any], vocab: int) -> None:
    draws = 20_000
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 1.5
    _, probs = reference(logits.double().tolist(), make_row(**settings))
    wanted = torch.zeros(vocab, dtype=torch.float64)
    wanted[list(probs)] = torch.tensor(list(probs.values()), dtype=torch.float64)
    tokens = sample(logits.expand(draws, vocab), [make_row(**settings)] * draws, Sampler(seed=3)).sampled_token_ids
    counts = tokens.bincount(minlength=vocab)
    statistic, limit = chi_square(counts, wanted)
    assert statistic < limit
    assert int(counts[wanted == 0].sum()) == 0
    # The test can tell: a distribution that is 10% off on half of the tokens does not pass.
    tilted = wanted * torch.tensor([1.1, 0.9], dtype=torch.float64).repeat(vocab)[:vocab]
    statistic, limit = chi_square(counts, tilted / tilted.sum())
    assert statistic > limit


def test_a_seeded_request_steps_through_its_distribution() -> None:
    vocab = 16
    logits, row = torch.linspace(-2, 2, vocab)[None], make_row(seed=11)
    metadata, sampler = SamplingMetadata.from_rows([row], vocab, "cpu"), Sampler()
    tokens = torch.cat([sampler(logits, metadata).sampled_token_ids for _ in range(3000)])
    statistic, limit = chi_square(tokens.bincount(minlength=vocab), logits[0].softmax(0))
    assert statistic < limit


def test_seeds_do_not_depend_on_batch_mates() -> None:
    vocab, steps = 1500, 12
    # Logits of 8 bits of mantissa have many ties, also at the borders of the cuts.
    logits = torch.randn(steps, vocab, generator=torch.Generator().manual_seed(5)).mul(2).bfloat16()
    seeded: dict[str, Any] = {"seed": 77, "temperature": 0.9, "top_p": 0.7, "top_k": 900}
    alone = [make_row(**seeded)]
    wanted = [int(sample(logits[step : step + 1], alone).sampled_token_ids) for step in range(steps)]
    assert len(set(wanted)) > steps // 2
    mates: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"temperature": 2.0, "top_p": 0.999}, {"seed": 77}, {"top_k": 3},
        {"min_p": 0.3, "logprobs": 4}, {"repetition_penalty": 1.5}, {"allowed_token_ids": [4, 5]}, {}, {}, {},
    ]  # fmt: skip
    rng, row = random.Random(0), make_row(**seeded)
    for step in range(steps):
        around = [make_row(**settings) for settings in rng.sample(mates, rng.randint(1, len(mates)))]
        place = rng.randint(0, len(around))
        rows = [*around[:place], row, *around[place:]]
        batch = torch.randn(len(rows), vocab).bfloat16()
        batch[place] = logits[step]
        assert int(sample(batch, rows, Sampler(seed=step)).sampled_token_ids[place]) == wanted[step]
    other = [make_row(**(seeded | {"seed": 78}))]
    assert [int(sample(logits[step : step + 1], other).sampled_token_ids) for step in range(steps)] != wanted


def test_a_greedy_batch_needs_no_tensors() -> None:
    rows = [make_row(temperature=0.0), make_row(temperature=0.0, max_tokens=3)]
    metadata = SamplingMetadata.from_rows(rows, 50, "cpu")
    tensors = [name for name in metadata.__slots__ if isinstance(getattr(metadata, name), Tensor)]
    assert tensors == []
    assert not metadata.random
    assert not metadata.changes_logits
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        logits = torch.randn(2, 50).to(dtype)
        output = Sampler()(logits, metadata)
        assert output.sampled_token_ids.tolist() == logits.float().argmax(-1).tolist()
        assert output.logprobs is None


def test_the_draw_at_its_ends() -> None:
    vocab = 1000  # the last block of the draw is not full
    logits = torch.full((4, vocab), -torch.inf)
    logits[0, 300:700] = 0.0
    logits[1, [5, 999]] = 0.0
    logits[2, 0] = 3.0
    logits[3] = torch.randn(vocab) * 20  # most probabilities are 0 in float32
    first = _pick(logits, torch.zeros(4, 1, dtype=torch.float64))
    last = _pick(logits, torch.full((4, 1), 1.0 - 2.0**-53, dtype=torch.float64))
    middle = _pick(logits, torch.full((4, 1), 0.5, dtype=torch.float64))
    assert first[:3].tolist() == [300, 5, 0]
    assert last[:3].tolist() == [699, 999, 0]
    assert middle[:3].tolist() == [500, 999, 0]
    # A fraction that rounding has brought to the whole itself still points at a token with a probability.
    assert _pick(logits, torch.ones(4, 1, dtype=torch.float64))[:3].tolist() == [699, 999, 0]
    probs = logits[3].softmax(0)
    assert probs[first[3]] > 0
    assert probs[last[3]] > 0


def test_nan_logits_still_give_a_token_of_the_vocabulary() -> None:
    rows = [make_row(), make_row(top_k=3, top_p=0.5, min_p=0.1), make_row(temperature=0.0)]
    tokens = sample(torch.full((3, 300), torch.nan), rows).sampled_token_ids
    assert int(tokens.min()) >= 0
    assert int(tokens.max()) < 300


@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.97, 0.9999])
@pytest.mark.parametrize("spread", [0.001, 0.5, 5.0])
def test_top_p_of_flat_and_peaked_rows(top_p: float, spread: float) -> None:
    """Flat rows need more than the first guess of how many tokens gather top_p; mates with top_p off need none."""
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(2)) * spread
    rows = [make_row(top_p=top_p), make_row(), make_row(top_p=0.2)]
    cut = apply_cuts(logits.clone(), SamplingMetadata.from_rows(rows, 5000, "cpu"))
    for index, p in enumerate((top_p, 1.0, 0.2)):
        probs, order = logits[index].double().softmax(0).sort(descending=True)
        kept = int((cut[index] > -torch.inf).sum())
        assert bool((cut[index][order[:kept]] > -torch.inf).all()), "not the likeliest ones"
        # Within what a float32 sum can tell: all that is kept makes up top_p, and without its last token it does not.
        assert float(probs[:kept].sum()) > p - 1e-5
        assert float(probs[: kept - 1].sum()) < p + 1e-5


@pytest.mark.parametrize("mode", get_args(LogprobsMode))
def test_logprobs_of_every_mode(mode: LogprobsMode) -> None:
    rows = [
        make_row(temperature=0.5, top_k=4, logprobs=2, seed=1, logit_bias={3: 2.0}),
        make_row(temperature=0.0, logprobs=-1, logit_bias={7: -1.0}),
        make_row(temperature=1.0, top_p=0.9, logprobs=None),
    ]
    logits = torch.randn(3, 9, generator=torch.Generator().manual_seed(4)) * 2
    output = sample(logits, rows, Sampler(logprobs_mode=mode))
    values = logits.clone()
    if mode.startswith("processed"):
        values[0, 3] += 2.0
        values[1, 7] -= 1.0
        values[0] /= 0.5
        values[0, values[0].argsort(descending=True)[4:]] = -torch.inf
    if mode.endswith("logprobs"):
        values = values.log_softmax(-1)
    assert output.logprobs is not None
    found = output.logprobs.to_dicts([row.params.logprobs for row in rows])
    assert found[2] is None
    for index, count in ((0, 2), (1, 9)):
        entry, token = found[index], int(output.sampled_token_ids[index])
        assert entry is not None
        top = values[index].topk(count).indices.tolist()
        assert list(entry) == list(dict.fromkeys([token, *top]))
        assert [lp.logprob for lp in entry.values()] == pytest.approx([float(values[index, t]) for t in entry])
        assert entry[token].rank == int((values[index] >= values[index, token]).sum())
        assert all(entry[t].rank == place for place, t in enumerate(top, start=1) if t != token)


def test_logprobs_of_given_tokens() -> None:
    """The prompt's tokens: more rows than are worked on at a time, ties count against the rank."""
    values = torch.tensor([[0.0, -1.0, -1.0, -2.0]]).repeat(19, 1)
    found = gather_logprobs(values, 2, torch.arange(19) % 4)
    assert found.token_ids[:4, 0].tolist() == [0, 1, 2, 3]
    assert found.token_ids[:, 1].tolist() == [0] * 19
    assert found.values[3].tolist() == [-2.0, 0.0, -1.0]
    assert found.ranks.tolist() == [(1, 3, 3, 4)[i % 4] for i in range(19)]


def test_bad_words_and_min_tokens_follow_the_output() -> None:
    output: list[int] = []
    row = make_row(output=output, temperature=0.0, bad_words_token_ids=((4, 5), (9,)), min_tokens=2)
    metadata, sampler = SamplingMetadata.from_rows([row], 10, "cpu"), Sampler()
    logits = torch.arange(10.0)[None]
    logits[0, 0] = 50.0  # the end of text
    logits[0, 5] = 40.0
    tokens = []
    for _ in range(3):  # the same metadata: only the output grows
        tokens.append(int(sampler(logits, metadata).sampled_token_ids))
        output.append(4)
    assert tokens == [5, 8, 0]


def test_requests_without_a_seed_share_the_samplers_stream() -> None:
    logits, rows = torch.zeros(20, 500), [make_row() for _ in range(20)]
    first, again, other = (sample(logits, rows, Sampler(seed=s)).sampled_token_ids.tolist() for s in (1, 1, 2))
    assert first == again != other
    assert len(set(first)) > 10


def test_generators_only_where_they_are_used() -> None:
    sampler, cpu = Sampler(), torch.device("cpu")
    assert sampler.generator_for(SamplingParams(seed=3), cpu) is not None
    assert sampler.generator_for(SamplingParams(), cpu) is None
    assert sampler.generator_for(SamplingParams(seed=3, temperature=0.0), cpu) is None
    sampler.profile(torch.zeros(5, 20))
