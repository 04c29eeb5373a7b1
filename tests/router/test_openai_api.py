"""The HTTP API over a scripted engine: replies, streams, usage, logprobs, stop strings."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from api_client import ApiClient, Reply, api_client
from pageray.cluster.generation import GenerateRequest
from pageray.router.tokenizer import Tokenizer
from scripted_engine import ScriptedEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


def serve(
    folder: Path, engine: ScriptedEngine, scenario: Callable[[ApiClient], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with api_client(engine, folder) as client:
            await scenario(client)

    asyncio.run(main())


def saying(tokenizer: Tokenizer, *texts: str, **settings: Any) -> ScriptedEngine:
    """An engine whose sequence i says texts[i]."""
    replies = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]

    def script(request: GenerateRequest, index: int) -> tuple[int, ...]:
        return replies[index % len(replies)]

    return ScriptedEngine(script=script, **settings)


def streamed_text(reply: Reply, index: int = 0) -> str:
    choices = [c for event in reply.events for c in event["choices"] if c["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


def finish_reasons(reply: Reply) -> dict[int, str]:
    choices = [choice for event in reply.events for choice in event["choices"]]
    return {c["index"]: c["finish_reason"] for c in choices if c["finish_reason"]}


def test_completion_whole(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(COMPLETIONS, model="test", prompt="Say it", max_tokens=50)
        assert reply.status == 200
        assert reply.body["object"] == "text_completion"
        assert reply.body["id"].startswith("cmpl-")
        (choice,) = reply.body["choices"]
        assert choice["text"] == "naïve 🎉 end"
        assert choice["finish_reason"] == "stop"
        assert choice["stop_reason"] is None
        num_prompt = len(tokenizer.encode("Say it"))
        num_output = len(tokenizer.encode("naïve 🎉 end")) + 1
        assert reply.body["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": 1},
        }

    serve(model_folder, saying(tokenizer, "naïve 🎉 end", num_cached_tokens=1), scenario)


def test_chat_whole_and_streamed_agree(model_folder: Path, tokenizer: Tokenizer) -> None:
    text = "Grüße aus 北京 👩‍👩‍👧‍👦!"

    async def scenario(client: ApiClient) -> None:
        whole = await client.post(CHAT, model="test", messages=HI)
        stream = await client.post(
            CHAT,
            model="test",
            messages=HI,
            stream=True,
            stream_options={"include_usage": True},
        )
        assert whole.body["choices"][0]["message"] == {
            "role": "assistant",
            "content": text,
            "refusal": None,
        }
        assert streamed_text(stream) == text
        assert stream.is_done
        first, *middle, last = stream.events
        assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert last["choices"] == []
        assert last["usage"] == whole.body["usage"]
        assert all(event["usage"] is None for event in [first, *middle])
        assert finish_reasons(stream) == {0: "stop"}
        assert {event["object"] for event in stream.events} == {"chat.completion.chunk"}
        assert len({event["id"] for event in stream.events}) == 1

    serve(model_folder, saying(tokenizer, text), scenario)


def test_a_stream_without_include_usage_has_none(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        stream = await client.post(COMPLETIONS, model="test", prompt="x", stream=True)
        assert stream.events
        assert not any("usage" in event for event in stream.events)

    serve(model_folder, saying(tokenizer, "a b c"), scenario)


def test_chat_prompt_is_the_template(model_folder: Path, tokenizer: Tokenizer) -> None:
    engine = saying(tokenizer, "ok")

    async def scenario(client: ApiClient) -> None:
        parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
        await client.post(CHAT, model="test", messages=[{"role": "user", "content": parts}])
        text = tokenizer.decode(engine.requests[0].prompt_token_ids, skip_special_tokens=False)
        assert "<|im_start|>user\none\ntwo<|im_end|>" in text
        assert text.endswith("<|im_start|>assistant\n")

    serve(model_folder, engine, scenario)


@pytest.mark.parametrize(
    ("prompt", "num_choices"),
    [
        ("text", 1),
        (["a", "b", "c"], 3),
        ([1, 2, 3], 1),
        ([[5, 6], [7]], 2),
    ],
)
def test_every_form_of_prompt(
    model_folder: Path, prompt: Any, num_choices: int, tokenizer: Tokenizer
) -> None:
    engine = ScriptedEngine()

    async def scenario(client: ApiClient) -> None:
        reply = await client.post(COMPLETIONS, model="test", prompt=prompt, n=2)
        assert [choice["index"] for choice in reply.body["choices"]] == list(range(2 * num_choices))
        prompts = {request.prompt_token_ids for request in engine.requests}
        assert len(prompts) == num_choices
        if prompt == [1, 2, 3]:
            assert prompts == {(1, 2, 3)}

    serve(model_folder, engine, scenario)


class StopCase(NamedTuple):
    stop: str | list[str]
    include: bool
    text: str
    stop_reason: str | None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        StopCase("brown fox", False, "The quick ", "brown fox"),
        StopCase(["lazy", "jumps ov"], False, "The quick brown fox ", "jumps ov"),
        StopCase("jumps ov", True, "The quick brown fox jumps ov", "jumps ov"),
        StopCase("never", False, "The quick brown fox jumps over the lazy dog", None),
        StopCase("dog!", False, "The quick brown fox jumps over the lazy dog", None),
    ],
)
def test_stop_strings_over_token_boundaries(
    model_folder: Path, tokenizer: Tokenizer, stream: bool, case: StopCase
) -> None:
    engine = saying(tokenizer, "The quick brown fox jumps over the lazy dog")

    async def scenario(client: ApiClient) -> None:
        reply = await client.post(
            COMPLETIONS,
            model="test",
            prompt="x",
            max_tokens=100,
            stop=case.stop,
            include_stop_str_in_output=case.include,
            stream=stream,
        )
        if stream:
            assert streamed_text(reply) == case.text
            assert finish_reasons(reply) == {0: "stop"}
        else:
            (choice,) = reply.body["choices"]
            assert (choice["text"], choice["stop_reason"]) == (case.text, case.stop_reason)
        # The engine knows nothing of stop strings: ending early is an abort there.
        assert len(engine.aborted) == (case.stop_reason is not None)
        assert not engine.running

    serve(model_folder, engine, scenario)


def test_a_stop_string_ends_one_of_several_sequences(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    async def slow() -> None:
        await asyncio.sleep(0.001)

    engine = saying(
        tokenizer, "one STOP never seen " * 3, "two goes on to its end", before_step=slow
    )

    async def scenario(client: ApiClient) -> None:
        reply = await client.post(
            COMPLETIONS, model="test", prompt="x", max_tokens=100, n=2, stop="STOP"
        )
        texts = [choice["text"] for choice in reply.body["choices"]]
        assert texts == ["one ", "two goes on to its end"]
        assert [index for _, index in engine.finished_early] == [0]
        assert not engine.aborted

    serve(model_folder, engine, scenario)


def test_min_tokens_postpones_stop_strings(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(
            COMPLETIONS, model="test", prompt="x", max_tokens=100, stop=" a", min_tokens=3
        )
        assert reply.body["choices"][0]["text"] == " a a a"
        assert reply.body["usage"]["completion_tokens"] == 4

    serve(model_folder, saying(tokenizer, " a a a a a a"), scenario)


def test_stop_token_ids_and_length(model_folder: Path, tokenizer: Tokenizer) -> None:
    (comma,) = tokenizer.encode(",")

    async def scenario(client: ApiClient) -> None:
        stopped = await client.post(
            COMPLETIONS, model="test", prompt="x", max_tokens=9, stop_token_ids=[comma]
        )
        (choice,) = stopped.body["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("one", "stop")
        assert choice["stop_reason"] == comma
        cut = await client.post(COMPLETIONS, model="test", prompt="x", max_tokens=2)
        assert cut.body["choices"][0]["finish_reason"] == "length"
        assert cut.body["usage"]["completion_tokens"] == 2

    serve(model_folder, saying(tokenizer, "one, two, three"), scenario)


def test_completion_tokens_default_is_openais(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(COMPLETIONS, model="test", prompt="x", ignore_eos=True)
        assert reply.body["usage"]["completion_tokens"] == 16

    serve(model_folder, saying(tokenizer, "word"), scenario)


def test_max_completion_tokens_wins(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(
            CHAT, model="test", messages=HI, max_tokens=9, max_completion_tokens=3
        )
        assert reply.body["usage"]["completion_tokens"] == 3

    serve(model_folder, saying(tokenizer, "a b c d e f g h"), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs(model_folder: Path, tokenizer: Tokenizer, stream: bool) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(
            CHAT, model="test", messages=HI, logprobs=True, top_logprobs=2, stream=stream
        )
        if stream:
            entries = [
                entry
                for event in reply.events
                for choice in event["choices"]
                if choice["logprobs"]
                for entry in choice["logprobs"]["content"]
            ]
        else:
            entries = reply.body["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == ["Hello", " you"]
        assert [entry["logprob"] for entry in entries] == [-0.25, -0.5]
        assert entries[0]["bytes"] == list(b"Hello")
        assert [top["logprob"] for top in entries[1]["top_logprobs"]] == [-0.5, -1.5]

    serve(model_folder, saying(tokenizer, "Hello you"), scenario)


def test_completion_logprobs(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post(COMPLETIONS, model="test", prompt="x", logprobs=1)
        logprobs = reply.body["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["Hello", " you", " there"]
        assert logprobs["token_logprobs"] == [-0.25, -0.5, -0.75]
        assert logprobs["text_offset"] == [0, 5, 9]
        assert logprobs["top_logprobs"][0] == {"Hello": -0.25}

    serve(model_folder, saying(tokenizer, "Hello you there"), scenario)


def test_sampling_fields_reach_the_engine(model_folder: Path) -> None:
    engine = ScriptedEngine()

    async def scenario(client: ApiClient) -> None:
        await client.post(
            COMPLETIONS,
            model="test",
            prompt=[5],
            temperature=0.5,
            top_p=0.9,
            top_k=7,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            seed=3,
            max_tokens=4,
            cache_salt="tenant",
        )
        (request,) = engine.requests
        sampling = request.sampling
        assert request.cache_salt == "tenant"
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 7)
        assert (sampling.min_p, sampling.repetition_penalty, sampling.seed) == (0.1, 1.1, 3)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)

    serve(model_folder, engine, scenario)


def test_models_and_health(model_folder: Path) -> None:
    engine = ScriptedEngine()

    async def scenario(client: ApiClient) -> None:
        models = await client.request("GET", "/v1/models")
        (card,) = models.body["data"]
        assert (card["id"], card["max_model_len"], card["root"]) == (
            "test",
            512,
            "somewhere/test",
        )
        assert (await client.request("GET", "/v1/models/test")).body == card
        assert (await client.request("HEAD", "/v1/models")).status == 200
        missing = await client.request("GET", "/v1/models/no/such")
        assert (missing.status, missing.body["error"]["code"]) == (404, "model_not_found")
        assert (await client.request("GET", "/health")).status == 200
        engine.is_dead = True
        assert (await client.request("GET", "/health")).status == 503

    serve(model_folder, engine, scenario)


def test_tokenize_and_detokenize(model_folder: Path, tokenizer: Tokenizer) -> None:
    async def scenario(client: ApiClient) -> None:
        reply = await client.post("/tokenize", prompt="Hello you", return_token_strs=True)
        assert reply.body["tokens"] == tokenizer.encode("Hello you")
        assert reply.body["count"] == len(reply.body["tokens"])
        assert reply.body["token_strs"] == ["Hello", "Ġyou"]
        back = await client.post("/detokenize", model="test", tokens=reply.body["tokens"])
        assert back.body == {"prompt": "Hello you"}
        chat = await client.post("/tokenize", messages=HI)
        text = await client.post("/detokenize", tokens=chat.body["tokens"])
        assert text.body["prompt"].endswith("<|im_start|>assistant\n")
        neither = await client.post("/tokenize", model="test")
        assert neither.status == 400

    serve(model_folder, ScriptedEngine(), scenario)
