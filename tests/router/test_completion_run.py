"""News leaves at once; what accumulates behind a slow reader leaves together."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from local_model_client import LocalModelClient, start_server
from pageray.cluster.errors import ServerError
from pageray.cluster.generation import GenerateRequest, RequestOutput, SequenceOutput
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.completion_run import CompletionRun
from pageray.router.stream_merger import StreamMerger
from pageray.router.tokenizer import Tokenizer
from scripted_engine import ScriptedEngine


def request(tokenizer: Tokenizer, text: str, n: int = 1, name: str = "r") -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(name),
        prompt_token_ids=tuple(tokenizer.encode(text)),
        sampling=SamplingParams(n=n, max_tokens=64),
    )


async def start_run(
    engine: ScriptedEngine, tokenizer: Tokenizer, *requests: GenerateRequest
) -> CompletionRun:
    client = LocalModelClient(await start_server(engine))
    return CompletionRun(client, tokenizer, requests, eos_token_ids=engine.eos_token_ids)


def test_a_slow_reader_gets_more_at_a_time(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        run = await start_run(engine, tokenizer, request(tokenizer, "one two three four"))
        async with aclosing(run.deltas()) as batches:
            (first,) = await anext(batches)
            assert first.delta.text == "one"
            while engine.running:
                await asyncio.sleep(0)
            (rest,) = await anext(batches)
            assert rest.delta.text == " two three four"
            assert rest.delta.finish_reason is not None

    asyncio.run(main())


def test_several_prompts_run_side_by_side(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        engine = ScriptedEngine()
        prompts = [request(tokenizer, text, 2, text) for text in ("a b c", "x y")]
        run = await start_run(engine, tokenizer, *prompts)
        texts = [""] * run.num_choices
        async with aclosing(run.deltas()) as batches:
            async for batch in batches:
                assert len({news.index for news in batch}) == len(batch)
                for news in batch:
                    texts[news.index] += news.delta.text
        assert texts == ["a b c", " b c", "x y", " y"]
        assert run.num_prompt_tokens == 5
        # Each sequence ends with an EOS that is counted: 4 + 3 and 3 + 2 tokens.
        assert run.num_completion_tokens == 12

    asyncio.run(main())


def test_closing_early_aborts_every_request(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        never = asyncio.Event()
        steps = 0

        async def two_steps() -> None:
            nonlocal steps
            steps += 1
            if steps > 2:
                await never.wait()

        engine = ScriptedEngine(before_step=two_steps)
        prompts = [request(tokenizer, "a b c", 4, name) for name in ("p", "q")]
        run = await start_run(engine, tokenizer, *prompts)
        async with aclosing(run.deltas()) as batches:
            await anext(batches)
            assert engine.running == {"p", "q"}
        assert not engine.running
        assert sorted(engine.aborted) == ["p", "q"]

    asyncio.run(main())


def test_a_stream_that_ends_in_mid_sequence_is_an_error(tokenizer: Tokenizer) -> None:
    class CutClient(LocalModelClient):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
            yield output(5)

    async def main() -> None:
        client = CutClient(await start_server(ScriptedEngine()))
        run = CompletionRun(client, tokenizer, [request(tokenizer, "a")], eos_token_ids=(2,))
        with pytest.raises(ServerError, match="before the sequences were finished"):
            async for _ in run.deltas():
                pass

    asyncio.run(main())


def output(token_id: int) -> RequestOutput:
    sequence = SequenceOutput(index=0, token_ids=(token_id,))
    return RequestOutput(request_id=RequestId("r"), sequences=(sequence,), num_prompt_tokens=1)


def test_what_arrived_before_an_error_is_read_first() -> None:
    async def failing() -> AsyncGenerator[RequestOutput, None]:
        yield output(1)
        yield output(2)
        raise ServerError("gone")

    seen: list[int] = []

    async def read_all() -> None:
        async with StreamMerger([failing()]) as merger:
            async for batch in merger.batches():
                seen.extend(news.sequences[0].token_ids[0] for _, news in batch)

    with pytest.raises(ServerError, match="gone"):
        asyncio.run(read_all())
    assert seen == [1, 2]
