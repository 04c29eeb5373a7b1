"""An HTTP client for the router's application in this process."""

import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from local_model_client import LocalModelClient, start_server
from pageray.router.http_app import build_http_app
from pageray.router.openai_api import OpenAiApi
from pageray.router.served_model import ServedModel
from scripted_engine import ScriptedEngine


@dataclass
class Reply:
    """`body` is the JSON of a plain reply, `events` those of a stream, `[DONE]` left out."""

    status: int
    headers: httpx.Headers
    body: Any
    events: list[Any]
    is_done: bool


class ApiClient:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, **body: object) -> Reply:
        return _parsed(await self.http.post(path, json=body))

    async def post_bytes(self, path: str, body: bytes) -> Reply:
        return _parsed(await self.http.post(path, content=body))

    async def request(self, method: str, path: str, **headers: str) -> Reply:
        return _parsed(await self.http.request(method, path, headers=headers))


@asynccontextmanager
async def api_client(engine: ScriptedEngine, folder: Path) -> AsyncGenerator[ApiClient, None]:
    """A client of an application that serves `engine` as model "test"."""
    model = ServedModel.from_folder(
        folder,
        model_id="test",
        source="somewhere/test",
        client=LocalModelClient(await start_server(engine)),
    )
    app = build_http_app(OpenAiApi([model], created=1))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        yield ApiClient(http)


def _parsed(response: httpx.Response) -> Reply:
    events: list[Any] = []
    is_done = False
    body: Any = {}
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        for line in response.text.split("\n\n"):
            if line == "data: [DONE]":
                is_done = True
            elif line:
                events.append(json.loads(line.removeprefix("data: ")))
    elif response.content:
        body = response.json()
    return Reply(response.status_code, response.headers, body, events, is_done)
