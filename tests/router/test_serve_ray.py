"""The application under Ray Serve, with a scripted engine in two replicas."""

import asyncio
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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
LONG_S = 80 * STEP_S
"""A reply of `LONG` takes longer than this."""
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


def test_streams_survive_a_killed_replica(base_url: str) -> None:
    with ThreadPoolExecutor() as executor:
        streams = [executor.submit(_stream, base_url, f"{i} {LONG}") for i in range(6)]
        _wait_until(lambda: all(stats["num_running"] for stats in _stats()))
        os.kill(_replica_pids()[0], signal.SIGKILL)
        assert [stream.result() for stream in streams] == [f"{i} {LONG}" for i in range(6)]
    _wait_until(lambda: len(_replica_pids()) == 2, timeout_s=60)
    assert httpx.get(f"{base_url}/health").status_code == 200


@pytest.mark.parametrize("change", ["new version", "fewer replicas", "more replicas"])
def test_nothing_is_lost_when_replicas_are_exchanged(base_url: str, change: str) -> None:
    """Streams go on all the time; each is longer than the replicas are allowed to linger."""
    num_replicas = 1 if change == "fewer replicas" else 2
    before = set(_replica_pids())
    is_over = threading.Event()

    def keep_streaming(number: int) -> int:
        count = 0
        while not is_over.is_set():
            prompt = f"{number} {count} {LONG}"
            assert _stream(base_url, prompt) == prompt
            count += 1
        return count

    with ThreadPoolExecutor() as executor:
        streams = [executor.submit(keep_streaming, number) for number in range(4)]
        try:
            args = _serving_args(num_replicas=num_replicas, seed=1)
            application = build_application(args, engine_factory=start_paced_engine)
            serve.run(application, name=APPLICATION)
            _wait_until(lambda: _is_exchanged(before, change, num_replicas), timeout_s=60)
        finally:
            is_over.set()
        assert sum(stream.result() for stream in streams) >= 4


def _is_exchanged(before: set[int], change: str, num_replicas: int) -> bool:
    now = set(_replica_pids())
    if change == "new version":
        return len(now) == num_replicas and not now & before
    return len(now) == num_replicas


def _stream(base_url: str, prompt: str) -> str:
    """The text of a streamed completion, which for this engine is the prompt."""
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model=MODEL, prompt=prompt, max_tokens=200, stream=True)
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def _serving_args(num_replicas: int = 2, seed: int = 0) -> LLMServingArgs:
    return LLMServingArgs.model_validate(
        {
            "llm_configs": [
                {
                    "model_loading_config": {
                        "model_id": MODEL,
                        "model_source": "smollm2-135m",
                    },
                    "engine_kwargs": {"seed": seed},
                    "deployment_config": {
                        "num_replicas": num_replicas,
                        "graceful_shutdown_timeout_s": 2 * LONG_S,
                    },
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
