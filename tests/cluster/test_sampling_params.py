import math

import pytest

from pageray.cluster.errors import InvalidParameterError
from pageray.cluster.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(n=0), "n"),
        (SamplingParams(n=1000), "n"),
        (SamplingParams(temperature=-0.1), "temperature"),
        (SamplingParams(temperature=math.nan), "temperature"),
        (SamplingParams(temperature=math.inf), "temperature"),
        (SamplingParams(top_p=0.0), "top_p"),
        (SamplingParams(top_p=1.1), "top_p"),
        (SamplingParams(top_p=math.nan), "top_p"),
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(min_p=1.5), "min_p"),
        (SamplingParams(seed=2**63), "seed"),
        (SamplingParams(max_tokens=0), "max_tokens"),
        (SamplingParams(min_tokens=-1), "min_tokens"),
        (SamplingParams(min_tokens=6, max_tokens=5), "min_tokens"),
        (SamplingParams(repetition_penalty=0.0), "repetition_penalty"),
        (SamplingParams(repetition_penalty=math.inf), "repetition_penalty"),
        (SamplingParams(presence_penalty=2.1), "presence_penalty"),
        (SamplingParams(frequency_penalty=math.nan), "frequency_penalty"),
        (SamplingParams(logprobs=21), "logprobs"),
        (SamplingParams(stop=("",)), "stop"),
        (SamplingParams(stop=("x",) * 17), "stop"),
        (SamplingParams(stop=("x" * 1025,)), "stop"),
        (SamplingParams(stop_token_ids=(100,)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=(-1,)), "stop_token_ids"),
    ],
)
def test_every_bad_value_names_its_field(params: SamplingParams, param: str) -> None:
    with pytest.raises(InvalidParameterError) as caught:
        params.validate(vocab_size=100)
    assert caught.value.param == param


def test_limits_themselves_are_valid() -> None:
    for params in (
        SamplingParams(),
        SamplingParams(n=128, temperature=0.0, top_p=1e-6, top_k=-1, min_p=1.0),
        SamplingParams(max_tokens=5, min_tokens=5, stop_token_ids=(0, 99), logprobs=20),
        SamplingParams(presence_penalty=-2.0, frequency_penalty=2.0, seed=-(2**63)),
    ):
        params.validate(vocab_size=100)
