"""Offline generation with the real model."""

from collections.abc import Iterator

import pytest

from pageray.cluster.errors import ConfigError, InvalidParameterError
from pageray.cluster.generation import FinishReason
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(
        "smollm2-135m", dtype="float32", max_model_len=512, num_gpu_blocks_override=100
    ) as llm:
        yield llm


def test_chat_names_paris(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    assert "Paris" in answer.outputs[0].text
    assert answer.outputs[0].finish_reason is FinishReason.STOP
    assert "<|im_end|>" not in answer.outputs[0].text


def test_one_prompt_many_prompts_and_token_ids(llm: LLM) -> None:
    text = "The capital of France is"
    alone = llm.generate(text, GREEDY)
    ids = alone[0].prompt_token_ids
    together = llm.generate([text, "Once upon a time", list(ids)], GREEDY)
    assert len(alone) == 1
    assert len(together) == 3
    assert together[0].outputs[0].text == alone[0].outputs[0].text == together[2].outputs[0].text
    assert together[1].prompt == "Once upon a time"
    assert llm.generate(list(ids), GREEDY)[0].num_cached_tokens == 0  # less than one block


def test_stop_string_ends_only_its_sequence(llm: LLM) -> None:
    sampling = SamplingParams(n=3, seed=3, max_tokens=40, stop=(".",), ignore_eos=True)
    result = llm.generate("Once upon a time there was", sampling)[0]
    assert len(result.outputs) == 3
    for sequence in result.outputs:
        assert "." not in sequence.text
        if sequence.finish_reason is FinishReason.STOP:
            assert sequence.stop_reason == "."
        else:
            assert len(sequence.token_ids) == 40
    assert any(sequence.finish_reason is FinishReason.STOP for sequence in result.outputs)
    assert llm.stats().num_held_blocks == 0


def test_wrong_use_is_an_error_and_nothing_is_left_running(llm: LLM) -> None:
    with pytest.raises(InvalidParameterError, match="no tokens"):
        llm.generate([[1, 2], []], GREEDY)
    with pytest.raises(ConfigError, match="2 prompts but 1 sampling_params"):
        llm.generate(["a", "b"], [GREEDY])
    assert not llm.engine.has_requests
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        LLM("smollm2-135m", max_model_length=10)
