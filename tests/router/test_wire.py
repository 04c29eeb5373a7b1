"""Requests, outputs and errors arrive as they were sent."""

import pytest

from pageray.cluster.errors import (
    CapacityError,
    ClientError,
    ContextLengthError,
    EngineDeadError,
    InvalidParameterError,
    ModelLoadError,
    ModelNotFoundError,
    PageRayError,
    ServerError,
)
from pageray.cluster.generation import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    SequenceOutput,
    TokenLogprobs,
)
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.wire import (
    decode_frame,
    decode_request,
    encode_error,
    encode_output,
    encode_request,
)


def test_requests_and_outputs() -> None:
    request = GenerateRequest(
        request_id=RequestId("r"),
        prompt_token_ids=(1, 2**31),
        sampling=SamplingParams(n=3, stop=("é", "x"), seed=-(2**63)),
        cache_salt="salt",
    )
    assert decode_request(encode_request(request)) == request
    sequence = SequenceOutput(
        index=2,
        token_ids=(5,),
        finish_reason=FinishReason.LENGTH,
        logprobs=(TokenLogprobs(-0.5, (5, 6), (-0.5, -2.0)),),
    )
    output = RequestOutput(
        request_id=RequestId("r"), sequences=(sequence,), num_prompt_tokens=2, is_finished=True
    )
    assert decode_frame(encode_output(output)) == output


@pytest.mark.parametrize(
    "error",
    [
        ClientError("m", param="p"),
        InvalidParameterError("m", param="top_p"),
        ContextLengthError("m"),
        ModelNotFoundError("m", param="model"),
        CapacityError("m", 3.5),
        EngineDeadError("m"),
        ServerError("m"),
    ],
)
def test_errors_keep_class_words_and_fields(error: PageRayError) -> None:
    with pytest.raises(type(error)) as caught:
        decode_frame(encode_error(error))
    assert type(caught.value) is type(error)
    assert str(caught.value) == "m"
    assert vars(caught.value) == vars(error)


def test_an_error_that_clients_have_no_use_for_is_a_server_error() -> None:
    with pytest.raises(ServerError, match="weights"):
        decode_frame(encode_error(ModelLoadError("weights")))
