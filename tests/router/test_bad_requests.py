"""Whatever a client sends, it gets an error object, and the next request is served."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from api_client import ApiClient, api_client
from pageray.cluster.errors import CapacityError
from pageray.router.openai.parsing import MAX_BODY_BYTES
from scripted_engine import ScriptedEngine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
Case = tuple[dict[str, Any], str, str]
"""Fields of the body, the parameter that the error names, words of its message."""

USER = {"role": "user", "content": "Hi"}


async def assert_alive(client: ApiClient) -> None:
    reply = await client.post(COMPLETIONS, model="test", prompt=[5], max_tokens=2)
    assert reply.status == 200


def assert_refused(folder: Path, path: str, body: bytes, param: str, words: str) -> None:
    async def main() -> None:
        async with api_client(ScriptedEngine(), folder) as client:
            reply = await client.post_bytes(path, body)
            assert reply.status == 400, reply.body
            error = reply.body["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["param"] == param
            assert words in error["message"]
            await assert_alive(client)

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b'"text"',
        b'{"a": 1} trailing',
        b"\xff\xfe",
        b'{"model": "\\ud800"}',
        b"[" * 100_000,
        b'{"n": ' + b"9" * 5000 + b"}",
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_a_body_that_is_no_json_object(model_folder: Path, path: str, body: bytes) -> None:
    async def main() -> None:
        async with api_client(ScriptedEngine(), model_folder) as client:
            reply = await client.post_bytes(path, body)
            assert reply.status == 400, reply.body
            assert reply.body["error"]["message"]
            await assert_alive(client)

    asyncio.run(main())


COMPLETION_CASES: list[Case] = [
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "between 1"),
    ({"max_tokens": -1}, "max_tokens", "between 1"),
    ({"max_tokens": 2**64}, "max_tokens", "between"),
    ({"max_tokens": 511}, "max_tokens", "prompt has 2 tokens and max_tokens is 511"),
    ({"n": 0}, "n", "between 1"),
    ({"n": 10**9}, "n", "between"),
    ({"temperature": -0.1}, "temperature", "between"),
    ({"temperature": float("nan")}, "temperature", "between"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_k": -2}, "top_k", "between"),
    ({"seed": 2**80}, "seed", "between"),
    ({"stop": [""]}, "stop", "length of a stop string"),
    ({"stop": ["x"] * 17}, "stop", "number of stop strings"),
    ({"stop": 5}, "stop", "string"),
    ({"stop_token_ids": [49152]}, "stop_token_ids", "49152"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "-1"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids", "between"),
    ({"logprobs": 21}, "logprobs", "between"),
    ({"min_tokens": 30, "max_tokens": 20}, "min_tokens", "between"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream_options": 3}, "stream_options", "StreamOptions"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": [1, "a"]}, "prompt", "valid string"),
    ({"prompt": [49152]}, "prompt", "49152"),
    ({"prompt": [-1]}, "prompt", "-1"),
    ({"prompt": [2**70]}, "prompt", "between"),
    ({"prompt": ["a"] * 129}, "prompt", "at most 128"),
    ({"prompt": ["a"] * 100, "n": 2}, "n", "200 sequences"),
    ({"prompt": [5] * 512}, "prompt", "512 tokens"),
    ({"model": None}, "model", "string"),
    ({"echo": True}, "echo", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"best_of": 3}, "best_of", "not supported"),
    ({"temprature": 1}, "temprature", "Did you mean 'temperature'"),
    ({"cache_salt": "x" * 1025}, "cache_salt", "1024"),
]


@pytest.mark.parametrize(("fields", "param", "words"), COMPLETION_CASES)
def test_bad_fields_of_completions(
    model_folder: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    body = json.dumps({"model": "test", "prompt": [5, 6], **fields}).encode()
    assert_refused(model_folder, COMPLETIONS, body, param, words)


CHAT_CASES: list[Case] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "Hi"}, "messages", "list"),
    ({"messages": [{"content": "Hi"}]}, "messages.0.role", "required"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "messages.0.role", "'system'"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages.0.content",
        "'image_url' is not supported",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
        "messages.1.tool_calls",
        "not supported",
    ),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"top_logprobs": 3}, "top_logprobs", "needs logprobs"),
    ({"logprobs": True, "top_logprobs": 99}, "logprobs", "between"),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "exclude each other",
    ),
    ({"chat_template": "{{ evil }}"}, "chat_template", "not supported"),
]


@pytest.mark.parametrize(("fields", "param", "words"), CHAT_CASES)
def test_bad_fields_of_chat(
    model_folder: Path, fields: dict[str, Any], param: str, words: str
) -> None:
    body = json.dumps({"model": "test", "messages": [USER], **fields}).encode()
    assert_refused(model_folder, CHAT, body, param, words)


def test_fields_that_ask_for_nothing_are_accepted(model_folder: Path) -> None:
    async def main() -> None:
        async with api_client(ScriptedEngine(), model_folder) as client:
            reply = await client.post(
                CHAT,
                model="test",
                messages=[USER],
                max_tokens=3,
                tools=[],
                tool_choice="none",
                response_format={"type": "text"},
                logit_bias=None,
                user="someone",
                metadata={"a": "b"},
                store=False,
            )
            assert reply.status == 200

    asyncio.run(main())


def test_unknown_model_and_routes(model_folder: Path) -> None:
    async def main() -> None:
        async with api_client(ScriptedEngine(), model_folder) as client:
            reply = await client.post(COMPLETIONS, model="other", prompt="x")
            assert (reply.status, reply.body["error"]["code"]) == (404, "model_not_found")
            assert "There are: test" in reply.body["error"]["message"]
            nowhere = await client.request("GET", "/v2/nothing")
            assert (nowhere.status, nowhere.body["error"]["code"]) == (404, "not_found")
            wrong = await client.request("GET", COMPLETIONS)
            assert (wrong.status, wrong.headers["allow"]) == (405, "POST")
            assert "GET is not allowed" in wrong.body["error"]["message"]

    asyncio.run(main())


def test_a_huge_body_is_cut_off(model_folder: Path) -> None:
    body = b'{"model": "test", "prompt": "' + b"x" * MAX_BODY_BYTES + b'"}'

    async def main() -> None:
        async with api_client(ScriptedEngine(), model_folder) as client:
            reply = await client.post_bytes(COMPLETIONS, body)
            assert reply.status == 413
            assert str(MAX_BODY_BYTES) in reply.body["error"]["message"]
            await assert_alive(client)

    asyncio.run(main())


@pytest.mark.parametrize(("value", "status"), [("abc-123", 200), ("x" * 257, 400), ("a b", 400)])
def test_request_ids_are_bounded(model_folder: Path, value: str, status: int) -> None:
    async def main() -> None:
        async with api_client(ScriptedEngine(), model_folder) as client:
            reply = await client.request("GET", "/v1/models", **{"x-request-id": value})
            assert reply.status == status

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_no_room_is_503_with_retry_after(model_folder: Path, stream: bool) -> None:
    async def main() -> None:
        engine = ScriptedEngine(refusal=CapacityError("The queue is full.", 2.5))
        async with api_client(engine, model_folder) as client:
            reply = await client.post(COMPLETIONS, model="test", prompt="x", stream=stream)
            assert (reply.status, reply.headers["retry-after"]) == (503, "3")
            assert reply.body["error"]["message"] == "The queue is full."

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_a_dead_engine_is_503_or_an_error_event(model_folder: Path, stream: bool) -> None:
    async def main() -> None:
        engine = ScriptedEngine(dies_after_tokens=2)
        async with api_client(engine, model_folder) as client:
            reply = await client.post(
                COMPLETIONS, model="test", prompt="one two three four", stream=stream
            )
            if stream:
                assert reply.status == 200
                assert not reply.is_done
                assert reply.events[-1]["error"]["message"] == "Rank 0 is gone."
            else:
                assert (reply.status, reply.headers["retry-after"]) == (503, "5")
                assert reply.body["error"]["code"] == "engine_dead"

    asyncio.run(main())
