"""What the sampler must not do (sort, touch other rows), and how equal logits are cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from minivllm.sampling.metadata import SamplingMetadata, SamplingRow
from minivllm.sampling.params import SamplingParams
from minivllm.sampling.sampler import Sampler, apply_cuts, apply_masks_and_penalties


def make_row(params: SamplingParams, output: list[int] | None = None) -> SamplingRow:
    return SamplingRow(
        params=params,
        prompt_token_ids=[0],
        output_token_ids=[] if output is None else output,
        generator=Sampler().generator_for(params, torch.device("cpu")),
    )


def metadata_of(params: list[SamplingParams], vocab_size: int) -> SamplingMetadata:
    return SamplingMetadata.from_rows([make_row(each) for each in params], vocab_size, "cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Recorder(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operations(params: list[SamplingParams], vocab_size: int = 2000) -> list[str]:
    logits, metadata = normal(len(params), vocab_size).bfloat16(), metadata_of(params, vocab_size)
    with Recorder() as recorder:
        Sampler()(logits, metadata)
    return recorder.names


def test_a_greedy_batch_is_an_argmax_and_no_more() -> None:
    assert operations([SamplingParams(temperature=0)] * 4) == ["_to_copy", "argmax"]


@pytest.mark.parametrize("settings", [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9}], ids=str)
def test_nothing_sorts_the_vocabulary(settings: dict[str, Any]) -> None:
    for greedy in ([], [SamplingParams(temperature=0)]):
        names = operations([SamplingParams(**settings)] * 4 + greedy)
        assert "_softmax" in names
        assert not {"sort", "argsort", "msort"} & set(names)


def test_where_all_rows_draw_none_is_picked_out() -> None:
    assert metadata_of([SamplingParams()] * 3, 10).random_index is None


def test_rows_that_do_not_draw_are_not_cut() -> None:
    """One drawing row among greedy ones costs one row's work."""
    logits = normal(5, 100)
    params = [SamplingParams(temperature=0)] * 4 + [SamplingParams(top_k=5)]
    metadata = metadata_of(params, 100)
    shapes = []

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.overloadpacket.__name__ in {"topk", "_softmax", "div_", "masked_fill_"}:
                shapes.append(tuple(args[0].shape))
            return func(*args, **(kwargs or {}))

    with Shapes():
        Sampler()(logits, metadata)
    assert shapes
    assert {shape[0] for shape in shapes} == {1}


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    logits = normal(3, 700)
    params = [SamplingParams(seed=i, top_p=0.9, top_k=50) for i in range(3)]

    def steps() -> list[list[int]]:
        metadata, sampler = metadata_of(params, 700), Sampler()
        return [sampler(logits, metadata).sampled_token_ids.tolist() for _ in range(5)]

    healthy = steps()
    logits[1] = torch.nan
    assert [tokens[::2] for tokens in steps()] == [tokens[::2] for tokens in healthy]


@pytest.mark.parametrize(
    ("settings", "alive"),
    [
        ({"top_k": 1}, [4]), ({"top_k": 2}, [1, 3, 4, 6]), ({"top_k": 4}, [1, 3, 4, 6]),
        ({"top_p": 0.2}, [4]), ({"top_p": 0.4}, [1, 3, 4, 6]), ({"min_p": 0.6}, [1, 3, 4, 6]),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("mates", [0, 7])
def test_equal_logits_stay_or_go_together(settings: dict[str, Any], alive: list[int], mates: int) -> None:
    """Else which of them could be drawn would depend on the other rows (the likeliest has 0.31, each of them 0.19)."""
    logits = normal(mates + 1, 8)
    logits[mates] = torch.tensor([0.0, 2.0, 0.0, 2.0, 2.5, 0.0, 2.0, -1.0])
    metadata = metadata_of([SamplingParams(top_p=0.99, top_k=7)] * mates + [SamplingParams(**settings)], 8)
    assert (apply_cuts(logits, metadata)[mates] > -torch.inf).nonzero().flatten().tolist() == alive


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 3.0, 1.0, 5.0]])
    for dtype in (torch.float32, torch.bfloat16):
        output = Sampler()(logits.to(dtype), metadata_of([SamplingParams(temperature=0)] * 2, 4))
        assert output.sampled_token_ids.tolist() == [1, 0]


def test_penalties_see_tokens_that_came_after_the_metadata_was_made() -> None:
    row = make_row(SamplingParams(temperature=0, presence_penalty=2.0))
    metadata, sampler = SamplingMetadata.from_rows([row], 4, "cpu"), Sampler()
    logits, found = torch.tensor([[3.0, 2.5, 2.0, -9.0]]), []
    for _ in range(4):
        found.append(int(sampler(logits, metadata).sampled_token_ids))
        row.output_token_ids.append(found[-1])
    assert found == [0, 1, 2, 0]


def test_what_is_forbidden_stays_so() -> None:
    """Neither a bias nor a penalty that favours a token revives it, nor makes it NaN."""
    params = SamplingParams(
        allowed_token_ids=[1, 2], logit_bias={0: 100.0, 3: -100.0}, repetition_penalty=0.5, frequency_penalty=-2.0
    )
    metadata = SamplingMetadata.from_rows([make_row(params, [0, 3, 3])], 4, "cpu")
    assert apply_masks_and_penalties(torch.zeros(1, 4), metadata).tolist() == [[-torch.inf, 0.0, 0.0, -torch.inf]]
