"""A client that sends prompts as token ids, at given times, and notes when answers begin."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import httpx
import msgspec

from pageray.router.bench.routing_load import RoutingRequest

_TIMEOUT_S = 300.0
_OK = 200
_DATA, _DONE = "data: ", "data: [DONE]"
_LEAD_S = 0.05
"""Between the start of a run and the first request."""


@dataclass(frozen=True)
class Answer:
    first_token_s: float
    """After the request was due, not after it could be sent."""
    failure: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: _Error | None = None


class RoutingClient:
    def __init__(self, base_url: str, model: str) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=_TIMEOUT_S, limits=limits)
        self._model = model

    async def run_open(
        self, requests: Iterable[RoutingRequest], on_answer: Callable[[], object]
    ) -> list[Answer]:
        """Each request when it is due, whatever has become of the others; answers in their order."""
        start_s = asyncio.get_running_loop().time() + _LEAD_S

        async def send(request: RoutingRequest) -> Answer:
            due_s = start_s + request.arrival_s
            await asyncio.sleep(due_s - asyncio.get_running_loop().time())
            answer = await self._ask(request, due_s)
            on_answer()
            return answer

        return await asyncio.gather(*(send(request) for request in requests))

    async def run_closed(
        self, requests: Iterable[RoutingRequest], at_once: int, on_answer: Callable[[], object]
    ) -> list[Answer]:
        """`at_once` clients, each the next request as soon as its last one is answered; answers
        as they came."""
        left = iter(list(requests))
        answers: list[Answer] = []

        async def work() -> None:
            for request in left:
                answers.append(await self._ask(request, asyncio.get_running_loop().time()))
                on_answer()

        await asyncio.gather(*(work() for _ in range(at_once)))
        return answers

    async def close(self) -> None:
        await self._http.aclose()

    async def _ask(self, request: RoutingRequest, due_s: float) -> Answer:
        body = {
            "model": self._model,
            "prompt": list(request.prompt_token_ids),
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != _OK:
                    text = (await response.aread()).decode()[:300]
                    return Answer(float("nan"), f"HTTP {response.status_code}: {text}")
                return await _read(response, request, due_s)
        except httpx.HTTPError as error:
            return Answer(float("nan"), f"{type(error).__name__}: {error}")


async def _read(response: httpx.Response, request: RoutingRequest, due_s: float) -> Answer:
    first_token_s: float | None = None
    num_tokens = 0
    async for line in response.aiter_lines():
        if line == _DONE or not line.startswith(_DATA):
            continue
        chunk = msgspec.json.decode(line.removeprefix(_DATA), type=_Chunk)
        if chunk.error is not None:
            return Answer(float("nan"), chunk.error.message)
        # A chunk comes with every token, even if it makes no whole character yet.
        if chunk.choices and first_token_s is None:
            first_token_s = asyncio.get_running_loop().time() - due_s
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    if first_token_s is None or num_tokens != request.max_tokens:
        return Answer(float("nan"), f"{num_tokens} of {request.max_tokens} tokens came")
    return Answer(first_token_s)
