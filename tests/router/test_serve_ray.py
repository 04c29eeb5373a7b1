"""The application under Ray Serve, with a scripted engine in two replicas."""

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import httpx
import openai
import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

import scripted_engine
from pageray.router.builder import build_application, deployment_name
from pageray.router.llm_config import LLMServingArgs
from scripted_engine import STEP_S, start_paced_engine

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

MODEL = f"org/test.{os.getpid()}"
"""Ray names processes after deployments: with our process id in it, these are surely ours."""
APPLICATION = "app"
LONG = "one two three four five six seven eight nine ten " * 8
BOUND_S = 10.0
"""Within this time what must happen has happened, also on a busy machine."""


@pytest.fixture(scope="module")
def base_url() -> Iterator[str]:
    """A cluster with two replicas; ends with the module."""
    port = _free_port()
    support = Path(scripted_engine.__file__).parent
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(support)}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(
            build_application(_serving_args(), engine_factory=start_paced_engine),
            name=APPLICATION,
        )
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture
def client(base_url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)


def test_health_models_and_request_id(base_url: str) -> None:
    assert httpx.get(f"{base_url}/health").status_code == 200
    models = httpx.get(f"{base_url}/v1/models", headers={"x-request-id": "mine-1"})
    assert models.json()["data"][0]["id"] == MODEL
    assert models.json()["data"][0]["max_model_len"] == 512
    assert models.headers.get_list("x-request-id") == ["mine-1"]
    assert httpx.get(f"{base_url}/v1/models/{MODEL}").status_code == 200
    missing = httpx.get(f"{base_url}/v2/x")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_whole_and_streamed_agree(client: openai.OpenAI) -> None:
    prompt = "Zwölf Boxkämpfer 🥊 jagen Viktor"
    whole = client.completions.create(model=MODEL, prompt=prompt, max_tokens=64)
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=64, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert whole.choices[0].text == prompt
    assert "".join(pieces) == prompt


def test_the_first_token_leaves_at_once(client: openai.OpenAI) -> None:
    started_s = time.monotonic()
    stream = client.completions.create(model=MODEL, prompt=LONG, max_tokens=100, stream=True)
    next(iter(stream))
    first_s = time.monotonic() - started_s
    rest = sum(1 for _ in stream)
    total_s = time.monotonic() - started_s
    assert rest > 10
    assert total_s >= 80 * STEP_S
    assert first_s < total_s / 2


def test_errors_are_openais(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"prompt has .* max_tokens is 600"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=600)
    with pytest.raises(openai.NotFoundError, match="does not exist here"):
        client.completions.create(model="other", prompt="x")


ENDLESS = {
    "model": MODEL,
    "prompt": LONG,
    "max_tokens": 400,
    "ignore_eos": True,
    "n": 2,
}


def test_a_disconnect_stops_a_stream(base_url: str) -> None:
    with httpx.stream(
        "POST", f"{base_url}/v1/completions", json={**ENDLESS, "stream": True}
    ) as response:
        pieces = response.iter_bytes()
        next(pieces)
        assert _num_running() == 1
        # Used once more, since dropping the iterator would have hung up.
        next(pieces)
    _wait_until(lambda: _num_running() == 0)


def test_a_disconnect_stops_a_whole_reply(base_url: str) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{base_url}/v1/completions", json=ENDLESS, timeout=1.0)
    _wait_until(lambda: _num_running() == 0, timeout_s=5.0)


def test_many_at_once_use_both_replicas(base_url: str) -> None:
    async def main() -> list[int]:
        async with httpx.AsyncClient(timeout=60) as http:
            replies = await asyncio.gather(
                *(
                    http.post(
                        f"{base_url}/v1/completions",
                        json={"model": MODEL, "prompt": f"{i} " + LONG, "max_tokens": 50},
                    )
                    for i in range(30)
                )
            )
            return [reply.status_code for reply in replies]

    assert asyncio.run(main()) == [200] * 30
    assert len(_stats()) == 2
    assert _num_running() == 0


def test_a_stop_string_ends_one_sequence_on_its_replica(client: openai.OpenAI) -> None:
    # Sequence i says the prompt from token i on: only sequence 0 comes upon "alpha".
    reply = client.completions.create(
        model=MODEL, prompt="alpha beta gamma delta", max_tokens=30, n=2, stop="alpha"
    )
    assert [choice.text for choice in reply.choices] == ["", " beta gamma delta"]


def test_a_dead_replica_is_replaced(base_url: str, client: openai.OpenAI) -> None:
    os.kill(_replica_pids()[0], signal.SIGKILL)
    for _ in range(5):
        # Serve sends nothing to a replica that it knows to be dead.
        reply = client.with_options(max_retries=5).completions.create(model=MODEL, prompt="a b")
        assert reply.choices[0].text == "a b"
    _wait_until(lambda: len(_replica_pids()) == 2, timeout_s=60)
    assert httpx.get(f"{base_url}/health").status_code == 200


def _serving_args() -> LLMServingArgs:
    return LLMServingArgs.model_validate(
        {
            "llm_configs": [
                {
                    "model_loading_config": {
                        "model_id": MODEL,
                        "model_source": "smollm2-135m",
                    },
                    "deployment_config": {"num_replicas": 2},
                }
            ]
        }
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _stats() -> list[dict[str, float]]:
    """What each replica says of its engine."""
    handle = cast(
        "DeploymentHandle[object]",
        serve.get_deployment_handle(deployment_name(MODEL), APPLICATION),
    )
    return handle.broadcast("record_routing_stats").results(timeout_s=BOUND_S)


def _replica_pids() -> list[int]:
    title = f"ray::ServeReplica:{APPLICATION}:{deployment_name(MODEL)}".encode()
    pids: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes().startswith(title):
                pids.append(int(folder.name))
        except OSError:
            continue  # it ended in the meantime
    return pids


def _num_running() -> float:
    return sum(stats["num_running"] for stats in _stats())


def _wait_until(condition: Callable[[], bool], timeout_s: float = BOUND_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
