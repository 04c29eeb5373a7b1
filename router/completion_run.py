"""One HTTP request's generation: its engine requests, run and turned into text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from pageray.cluster.errors import PageRayError, ServerError
from pageray.cluster.generation import FinishReason, GenerateRequest, RequestOutput
from pageray.router.model_client import ModelClient
from pageray.router.sequence_text import SequenceText, TextDelta
from pageray.router.stream_merger import StreamMerger
from pageray.router.tokenizer import Tokenizer


@dataclass(frozen=True)
class ChoiceDelta:
    """What one choice gained. Choices count over prompts first: prompt i's sequence j of n is
    choice i * n + j."""

    index: int
    delta: TextDelta


class CompletionRun:
    """Runs the requests (one per prompt) and keeps the counts that `usage` reports.

    Detokenisation and stop strings live here, on the side of the client, so they outlive
    whatever engine computes the tokens.
    """

    def __init__(
        self,
        client: ModelClient,
        tokenizer: Tokenizer,
        requests: Sequence[GenerateRequest],
        *,
        eos_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ) -> None:
        self._client = client
        self._requests = requests
        self._texts = [
            [
                SequenceText(
                    tokenizer,
                    request.sampling,
                    prompt_token_ids=request.prompt_token_ids,
                    eos_token_ids=eos_token_ids,
                    skip_special_tokens=skip_special_tokens,
                )
                for _ in range(request.sampling.n)
            ]
            for request in requests
        ]
        self._num_cached_tokens = [0] * len(requests)
        self._background: set[asyncio.Task[None]] = set()

    @property
    def num_choices(self) -> int:
        return sum(len(texts) for texts in self._texts)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt_token_ids) for request in self._requests)

    @property
    def num_completion_tokens(self) -> int:
        return sum(text.num_tokens for texts in self._texts for text in texts)

    @property
    def num_cached_tokens(self) -> int:
        return sum(self._num_cached_tokens)

    async def deltas(self) -> AsyncGenerator[list[ChoiceDelta], None]:
        """Batches of news, at most one item per choice in each; the first as soon as there is
        any, later ones with all that has come meanwhile. Iterate once, and close: that aborts
        what still runs.

        Raises what the engine raises; `ServerError` when a stream ends in mid-sequence.
        """
        streams = [self._client.generate(request) for request in self._requests]
        async with StreamMerger(streams) as merger:
            async for batch in merger.batches():
                news = [
                    delta
                    for position, output in batch
                    for delta in self._take(position, output, merger)
                ]
                if news:
                    yield _joined_by_choice(news)
                if self._is_finished():
                    return
        if not self._is_finished():
            raise ServerError("The engine ended the stream before the sequences were finished.")

    def _is_finished(self) -> bool:
        return all(text.is_finished for texts in self._texts for text in texts)

    def _take(
        self, position: int, output: RequestOutput, merger: StreamMerger
    ) -> list[ChoiceDelta]:
        self._num_cached_tokens[position] = output.num_cached_tokens
        texts = self._texts[position]
        first_choice = sum(len(before) for before in self._texts[:position])
        news: list[ChoiceDelta] = []
        for sequence in output.sequences:
            text = texts[sequence.index]
            if text.is_finished:
                # Tokens that were on their way when a stop string ended the sequence.
                continue
            if sequence.finish_reason is FinishReason.ABORT:
                raise ServerError("The engine aborted the request.")
            delta = text.push(sequence)
            news.append(ChoiceDelta(first_choice + sequence.index, delta))
            if text.is_finished and sequence.finish_reason is None:
                self._finish_early(position, sequence.index, merger)
        return news

    def _finish_early(self, position: int, index: int, merger: StreamMerger) -> None:
        """A stop string, which the engine knows nothing of, has ended a sequence."""
        if all(text.is_finished for text in self._texts[position]):
            merger.stop(position)
            return
        task = asyncio.create_task(self._tell_engine(position, index))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _tell_engine(self, position: int, index: int) -> None:
        try:
            await self._client.finish_sequence(self._requests[position].request_id, index)
        except PageRayError:
            # Only saves work: without it the engine computes tokens that nobody reads.
            return


def _joined_by_choice(news: Sequence[ChoiceDelta]) -> list[ChoiceDelta]:
    """One item per choice, in the order in which the choices first appear."""
    joined: dict[int, TextDelta] = {}
    for item in news:
        before = joined.get(item.index)
        joined[item.index] = item.delta if before is None else before.followed_by(item.delta)
    return [ChoiceDelta(index, delta) for index, delta in joined.items()]
