"""A request that outlives the engines that serve it.

What has been delivered stays here, on the client's side: token ids, per sequence. When an engine
dies or is taken away, the request goes to another one as prompt + tokens so far, and goes on with
the next token. Every output says which position it starts at, so that nothing is delivered twice
and no hole goes unnoticed.
"""

import hashlib

import msgspec

from pageray.cluster.errors import ServerError
from pageray.cluster.generation import (
    GenerateRequest,
    RequestOutput,
    ResumedSequence,
    SequenceOutput,
)
from pageray.cluster.ids import RequestId


class ResumableRequest:
    """One request, over any number of attempts."""

    def __init__(self, request: GenerateRequest) -> None:
        sampling = request.sampling
        if sampling.seed is None:
            # Every attempt must draw alike, under whatever id and on whatever engine.
            sampling = msgspec.structs.replace(sampling, seed=_seed_of(request.request_id))
        self._request = msgspec.structs.replace(request, sampling=sampling)
        self._tokens: list[list[int]] = [[] for _ in range(sampling.n)]
        self._is_finished = [False] * sampling.n
        self._num_attempts = 0
        self._num_cached_tokens = 0

    @property
    def is_finished(self) -> bool:
        return all(self._is_finished)

    @property
    def attempt_id(self) -> RequestId:
        """The request's name at the engine that works on it now."""
        request_id = self._request.request_id
        if self._num_attempts <= 1:
            return request_id
        return RequestId(f"{request_id}.{self._num_attempts}")

    @property
    def num_delivered_tokens(self) -> int:
        return sum(len(tokens) for tokens in self._tokens)

    def next_attempt(self) -> GenerateRequest:
        """The request as the next engine gets it. Its id is another one each time: an engine may
        still be letting go of an earlier attempt."""
        self._num_attempts += 1
        resumed: tuple[ResumedSequence, ...] = ()
        if any(self._tokens) or any(self._is_finished):
            resumed = tuple(
                ResumedSequence(tuple(tokens), is_finished)
                for tokens, is_finished in zip(self._tokens, self._is_finished, strict=True)
            )
        return msgspec.structs.replace(self._request, request_id=self.attempt_id, resumed=resumed)

    def finish(self, index: int) -> None:
        """The client wants no more of this sequence."""
        self._is_finished[index] = True

    def accept(self, output: RequestOutput) -> RequestOutput | None:
        """What is new in an attempt's output, under the request's own id; None if nothing is.

        Raises `ServerError` when tokens are missing before it.
        """
        if self._num_attempts == 1:
            # Later attempts find the pages of earlier ones; that is no hit of the client's.
            self._num_cached_tokens = output.num_cached_tokens
        news = [new for sequence in output.sequences if (new := self._take(sequence)) is not None]
        if not news:
            return None
        return msgspec.structs.replace(
            output,
            request_id=self._request.request_id,
            sequences=tuple(news),
            num_cached_tokens=self._num_cached_tokens,
            is_finished=self.is_finished,
        )

    def _take(self, sequence: SequenceOutput) -> SequenceOutput | None:
        tokens = self._tokens[sequence.index]
        num_known = len(tokens) - sequence.position
        if num_known < 0:
            raise ServerError(
                f"Sequence {sequence.index} continues at token {sequence.position}, but only "
                f"{len(tokens)} have come."
            )
        if self._is_finished[sequence.index]:
            return None
        fresh = sequence.token_ids[num_known:]
        if not fresh and sequence.finish_reason is None:
            return None
        tokens.extend(fresh)
        self._is_finished[sequence.index] = sequence.finish_reason is not None
        return msgspec.structs.replace(
            sequence,
            token_ids=fresh,
            position=sequence.position + num_known,
            logprobs=sequence.logprobs[num_known:],
        )


def _seed_of(request_id: RequestId) -> int:
    digest = hashlib.sha256(request_id.encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)
