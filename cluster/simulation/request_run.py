"""One request over any number of engines: `router/resumable_request.py` with a stopwatch."""

import msgspec

from pageray.cluster.generation import GenerateRequest, RequestOutput, ResumedSequence
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.simulation.executor import output_token
from pageray.cluster.simulation.workload import Arrival


class RequestRun:
    """Every token is compared with the only right one; what differs raises `AssertionError`."""

    def __init__(self, number: int, arrival: Arrival, block_size: int) -> None:
        self.number = number
        self.arrived_s = arrival.time_s
        self.num_prompt_tokens = arrival.num_prompt_tokens
        self.num_output_tokens = arrival.num_output_tokens
        self.first_token_s: float | None = None
        self.num_cached_tokens = 0
        """Prompt tokens that the first engine to answer found in its cache."""
        self.num_finishes = 0
        self.num_attempts = 0
        self._num_tokens = 0
        self._request: GenerateRequest | None = GenerateRequest(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=arrival.prompt(block_size),
            sampling=SamplingParams(
                max_tokens=arrival.num_output_tokens, seed=number, ignore_eos=True
            ),
        )

    @property
    def is_finished(self) -> bool:
        return self.num_finishes > 0

    def next_attempt(self) -> GenerateRequest:
        """As the next engine gets it: what has come goes along, and so does no token twice."""
        request = self._request
        assert request is not None, f"request {self.number} is attempted after its end"
        self.num_attempts += 1
        tokens = tuple(output_token(self.number, i) for i in range(self._num_tokens))
        return msgspec.structs.replace(
            request,
            request_id=RequestId(f"r{self.number}.{self.num_attempts}"),
            resumed=(ResumedSequence(tokens),) if tokens else (),
        )

    def accept(self, output: RequestOutput, now_s: float) -> None:
        [sequence] = output.sequences
        assert sequence.position == self._num_tokens, (
            f"request {self.number}: token {sequence.position} came after {self._num_tokens}"
        )
        if self.first_token_s is None:
            self.first_token_s = now_s
            self.num_cached_tokens = output.num_cached_tokens
        for token in sequence.token_ids:
            expected = output_token(self.number, self._num_tokens)
            assert token == expected, f"request {self.number}: {token} is not {expected}"
            self._num_tokens += 1
        if output.is_finished:
            assert self._num_tokens == self.num_output_tokens, self
            self.num_finishes += 1
            # A hundred thousand prompts would fill the memory.
            self._request = None
