"""The output processor: text, log-probabilities and ends of every sample, one output a request."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from minivllm.output_processor import OutputProcessor
from minivllm.outputs import EngineCoreOutput, Logprob, RequestOutput
from minivllm.sampling.params import SamplingParams

WORDS = ["<eos>", "▁the", "▁cat", "▁sat", "▁on", "▁a", "▁mat", ".", "▁ST", "OP", "<|end|>"]
EOS, THE, CAT, SAT, ON, A, MAT, DOT, ST, OP, END = range(len(WORDS))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One word a token; the first word of a text loses its space."""
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="."))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", additional_special_tokens=["<|end|>"])


@pytest.fixture
def processor(tokenizer: Any) -> OutputProcessor:
    return OutputProcessor(tokenizer)


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=50, **settings)


def news(request_id: str, *tokens: int, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id=request_id, new_token_ids=list(tokens), **fields)


def feed(processor: OutputProcessor, *items: EngineCoreOutput) -> list[RequestOutput]:
    outputs, stopped = processor.process_outputs(list(items))
    assert stopped == []
    return outputs


def test_text_grows_and_ends(processor: OutputProcessor) -> None:
    assert processor.add_request("r", "the", [THE], params()) == ["r"]
    assert "r" in processor
    texts = []
    for token in (CAT, SAT, DOT):
        (output,) = feed(processor, news("r", token))
        assert (output.request_id, output.prompt, output.prompt_token_ids) == ("r", "the", [THE])
        assert not output.finished
        assert output.outputs[0].finish_reason is None
        texts.append(output.outputs[0].text)
    assert texts == [" cat", " cat sat", " cat sat."]  # with its space: the prompt comes before
    (output,) = feed(processor, news("r", EOS, finish_reason="stop"))
    assert output.finished
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == (" cat sat.", [CAT, SAT, DOT, EOS])
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert len(processor) == 0
    assert processor.request_ids() == []


def test_each_request_has_its_own_text_and_its_place_in_the_outputs(processor: OutputProcessor) -> None:
    processor.add_request("x", None, [THE], params())
    processor.add_request("y", None, [THE], params())
    outputs = feed(processor, news("y", MAT), news("x", CAT))
    assert [(output.request_id, output.outputs[0].text) for output in outputs] == [("y", " mat"), ("x", " cat")]
    assert [output.request_id for output in feed(processor, news("x", DOT))] == ["x"]  # y did not change


@pytest.mark.parametrize(
    ("include", "text"), [(False, " cat sat"), (True, " cat sat<|end|>")], ids=["left out", "included"]
)
def test_a_stop_token_has_its_reason_and_no_text(processor: OutputProcessor, include: bool, text: str) -> None:
    settings = params(stop_token_ids=[END], include_stop_str_in_output=include, skip_special_tokens=False)
    processor.add_request("r", None, [THE], settings)
    feed(processor, news("r", CAT), news("r", SAT))
    (output,) = feed(processor, news("r", END, finish_reason="stop", stop_reason=END))
    (completion,) = output.outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (text, "stop", END)
    assert completion.token_ids == [CAT, SAT, END]  # the ids are reported whatever the text


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_the_request_and_is_told_to_the_engine(processor: OutputProcessor, include: bool) -> None:
    processor.add_request("r", None, [THE], params(stop=[" STOP", "zebra"], include_stop_str_in_output=include))
    feed(processor, news("r", CAT))
    feed(processor, news("r", ST))
    outputs, stopped = processor.process_outputs([news("r", OP)])
    assert stopped == ["r"]
    (completion,) = outputs[0].outputs
    assert outputs[0].finished
    assert completion.text == (" cat STOP" if include else " cat")
    assert (completion.finish_reason, completion.stop_reason) == ("stop", " STOP")
    assert completion.token_ids == [CAT, ST, OP]
    assert feed(processor, news("r", MAT)) == []  # what the engine had on its way is ignored


def test_a_stop_string_in_the_last_allowed_token_is_a_stop(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params(stop=["cat"]))
    outputs, stopped = processor.process_outputs([news("r", CAT, finish_reason="length")])
    assert stopped == []  # the scheduler has already ended it
    (completion,) = outputs[0].outputs
    assert (completion.text, completion.finish_reason, completion.stop_reason) == (" ", "stop", "cat")


def test_a_stop_string_ends_only_its_sample(processor: OutputProcessor) -> None:
    ids = processor.add_request("r", "the", [THE], params(n=3, stop="cat"))
    assert len(set(ids)) == 3
    assert processor.engine_ids("r") == ids
    outputs, stopped = processor.process_outputs([news(ids[0], SAT), news(ids[1], CAT), news(ids[2], MAT)])
    assert stopped == [ids[1]]
    (output,) = outputs  # one for the user's request, whatever the number of its samples
    assert output.request_id == "r"
    assert not output.finished
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert [c.finish_reason for c in output.outputs] == [None, "stop", None]
    assert processor.engine_ids("r") == [ids[0], ids[2]]

    (output,) = feed(processor, news(ids[0], DOT), news(ids[2], DOT, finish_reason="length"))
    assert not output.finished
    assert output.outputs[1].token_ids == [CAT]  # the ended sample stays as it was
    (output,) = feed(processor, news(ids[0], EOS, finish_reason="stop"))
    assert output.finished
    assert [c.text for c in output.outputs] == [" sat.", " ", " mat."]
    assert [c.finish_reason for c in output.outputs] == ["stop", "stop", "length"]
    assert "r" not in processor


def test_held_back_text_is_shown_at_the_end(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params(stop="sat on the moon"))
    (output,) = feed(processor, news("r", SAT, ON))
    assert output.outputs[0].text == ""
    (output,) = feed(processor, news("r", A, finish_reason="length"))
    assert output.outputs[0].text == " sat on a"


def test_abort_gives_a_last_output_with_all_text_and_forgets(processor: OutputProcessor) -> None:
    ids = processor.add_request("r", None, [THE], params(n=2, stop="sat on the moon"))
    feed(processor, news(ids[0], SAT, ON), news(ids[1], CAT, finish_reason="length"))
    output = processor.abort("r")
    assert output is not None
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "length"]  # an ended sample keeps its reason
    assert output.outputs[0].text == " sat on"  # nothing stays held back
    assert "r" not in processor
    assert processor.engine_ids("r") == []
    assert processor.abort("r") is None
    assert feed(processor, news(ids[0], MAT)) == []


def test_the_scheduler_may_end_a_request_without_a_token(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params(stop="sat on the moon"))
    feed(processor, news("r", SAT))
    (output,) = feed(processor, news("r", finish_reason="error", error="no room"))
    assert output.finished
    assert output.error == "no room"
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == (" sat", "error")


def test_snapshots_do_not_change_behind_the_callers_back(processor: OutputProcessor) -> None:
    ids = processor.add_request("r", "the", [THE], params(n=2, logprobs=0))
    entry = {CAT: Logprob(-0.5, 1)}
    (first,) = feed(processor, news(ids[0], CAT, new_logprobs=[entry], num_cached_tokens=16))
    kept = copy.deepcopy(first)
    feed(processor, news(ids[0], CAT, new_logprobs=[entry]), news(ids[1], CAT, new_logprobs=[entry]))
    (last,) = feed(
        processor,
        news(ids[0], EOS, finish_reason="stop", new_logprobs=[{EOS: Logprob(-1.0, 1)}]),
        news(ids[1], CAT, finish_reason="length", new_logprobs=[entry]),
    )
    assert first == kept
    # Nor can a caller who changes an output disturb what comes later.
    last.outputs[0].token_ids.clear()
    assert kept.outputs[0].token_ids == [CAT]
    assert (first.num_cached_tokens, last.num_cached_tokens) == (16, 16)


def test_a_caller_may_change_what_it_got(processor: OutputProcessor) -> None:
    processor.add_request("r", "the", [THE], params(logprobs=0))
    (first,) = feed(processor, news("r", CAT, new_logprobs=[{CAT: Logprob(-0.5, 1)}]))
    first.outputs[0].token_ids.clear()
    assert first.outputs[0].logprobs is not None
    first.outputs[0].logprobs.clear()
    first.outputs.clear()
    (second,) = feed(processor, news("r", SAT, new_logprobs=[{SAT: Logprob(-0.5, 1)}]))
    assert second.outputs[0].token_ids == [CAT, SAT]
    assert second.outputs[0].text == " cat sat"
    assert second.outputs[0].logprobs is not None
    assert [next(iter(entry)) for entry in second.outputs[0].logprobs] == [CAT, SAT]


def test_logprobs_are_decoded_and_summed_over_the_sampled_tokens(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params(logprobs=1))
    # The likeliest token is not the sampled one; the sum is of the sampled.
    feed(processor, news("r", CAT, new_logprobs=[{CAT: Logprob(-2.0, 4), SAT: Logprob(-0.25, 1)}]))
    (output,) = feed(processor, news("r", MAT, new_logprobs=[{MAT: Logprob(-0.5, 1)}]))
    (completion,) = output.outputs
    assert completion.logprobs == [
        {CAT: Logprob(-2.0, 4, "cat"), SAT: Logprob(-0.25, 1, "sat")},
        {MAT: Logprob(-0.5, 1, "mat")},
    ]
    assert completion.cumulative_logprob == -2.5


def test_no_logprobs_where_none_were_asked_for(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params())
    (output,) = feed(processor, news("r", CAT))
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None


def test_prompt_logprobs_come_once_and_stay(processor: OutputProcessor) -> None:
    ids = processor.add_request("r", None, [THE, CAT], params(n=2, prompt_logprobs=0))
    feed(processor, news(ids[0], SAT, prompt_logprobs=[None, {CAT: Logprob(-3.0, 7)}]))
    (output,) = feed(processor, news(ids[0], DOT), news(ids[1], DOT))
    assert output.prompt_logprobs == [None, {CAT: Logprob(-3.0, 7, "cat")}]


def test_without_a_tokenizer_there_are_ids_only() -> None:
    processor = OutputProcessor(None)
    processor.add_request("r", None, [THE], params(logprobs=0, stop_token_ids=[END]))
    feed(processor, news("r", CAT, new_logprobs=[{CAT: Logprob(-1.0, 1)}]))
    last = news("r", END, finish_reason="stop", stop_reason=END, new_logprobs=[{END: Logprob(-1.0, 1)}])
    (output,) = feed(processor, last)
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids, completion.stop_reason) == ("", [CAT, END], END)
    assert completion.logprobs == [{CAT: Logprob(-1.0, 1)}, {END: Logprob(-1.0, 1)}]


def test_detokenize_false_gives_no_text(processor: OutputProcessor) -> None:
    processor.add_request("r", None, [THE], params(detokenize=False))
    feed(processor, news("r", CAT))
    (output,) = feed(processor, news("r", SAT, finish_reason="length"))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", [CAT, SAT])
