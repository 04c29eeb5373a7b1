"""`pageray serve` with the real engine: a process is started, asked, and told to stop."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

MODEL = "smollm2-135m"
START_S = 300.0  # a new machine compiles kernels first
STOP_S = 60.0
PROMPT = "The capital of France is"


@dataclass
class Server:
    process: subprocess.Popen[str]
    base_url: str
    ready_line: str


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    port = _free_port()
    process = _start(port)
    try:
        line = _first_line(process)
        yield Server(process, f"http://127.0.0.1:{port}", line)
    finally:
        _stop(process)


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=0)


def test_one_line_says_that_it_is_ready(server: Server) -> None:
    expected = rf"PageRay ready: {MODEL} at {server.base_url}/v1 \(\d+\.\d s\)\n"
    assert re.fullmatch(expected, server.ready_line)


def test_greedy_text_is_the_same_every_time(client: openai.OpenAI) -> None:
    """Cold, from cached pages, and streamed."""
    cold, hot = (
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0)
        for _ in range(2)
    )
    stream = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, stream=True
    )
    assert "Paris" in cold.choices[0].text
    assert hot.choices[0].text == cold.choices[0].text
    assert "".join(chunk.choices[0].text for chunk in stream) == cold.choices[0].text


def test_a_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        max_tokens=24,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    (choice,) = reply.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry in choice.logprobs.content:
        assert entry.logprob <= 0
        # Greedy: the chosen token is the likeliest.
        assert entry.top_logprobs[0].token == entry.token


def test_a_seed_repeats_and_sequences_differ(client: openai.OpenAI) -> None:
    first, second = (
        client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=16, n=2, seed=7, temperature=1.0
        )
        for _ in range(2)
    )
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert texts[0] != texts[1]


def test_a_long_shared_prompt_is_served_from_cached_pages(client: openai.OpenAI) -> None:
    prompt = "You are a careful assistant. " * 30
    client.completions.create(model=MODEL, prompt=prompt + "One", max_tokens=1)
    reply = client.completions.create(model=MODEL, prompt=prompt + "Two", max_tokens=1)
    assert reply.usage is not None
    details = reply.usage.prompt_tokens_details
    assert details is not None
    assert details.cached_tokens is not None
    assert 100 < details.cached_tokens < reply.usage.prompt_tokens


def test_bad_input_kills_nothing(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=[10**9], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="context holds"):
        client.completions.create(model=MODEL, prompt="x", max_tokens=10**6)
    reply = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1)
    assert reply.choices


def test_a_taken_port_is_said_at_once(server: Server) -> None:
    port = int(server.base_url.rpartition(":")[2])
    second = _start(port)
    _, errors = second.communicate(timeout=START_S)
    assert second.returncode == 1
    assert f"Port {port} on 127.0.0.1 cannot be used" in errors
    assert httpx.get(f"{server.base_url}/health").status_code == 200


def test_a_killed_rank_is_replaced_and_sigterm_stops_everything() -> None:
    process = _start(port := _free_port(), "cpu-tp2")
    try:
        assert _first_line(process).startswith("PageRay ready")
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=START_S
        )
        assert "Paris" in _ask_capital(client)
        ranks = [pid for pid in _descendants(process.pid) if "RankActor" in _command_line(pid)]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        # Errors are clear ones, and soon another group of ranks answers.
        deadline = time.monotonic() + START_S
        while "Paris" not in (answer := _ask_capital(client)):
            assert "openai.InternalServerError" in answer
            assert time.monotonic() < deadline
            time.sleep(0.2)
        children = _descendants(process.pid)
        assert not set(ranks) & {pid for pid in children if _is_alive(pid)}
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    finally:
        _stop(process)
    deadline = time.monotonic() + STOP_S
    while survivors := [pid for pid in children if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still alive: {survivors}"
        time.sleep(0.1)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/health")


def _ask_capital(client: openai.OpenAI) -> str:
    """The model's answer, or the name and text of the server error that came instead."""
    try:
        reply = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=12,
            temperature=0,
        )
    except openai.InternalServerError as error:
        return f"openai.InternalServerError {error}"
    return reply.choices[0].message.content or ""


def _start(port: int, config: str = "cpu") -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-P", "-m", "pageray.router.cli", "serve", config]
    settings = ["--port", str(port), "--set", "engine_kwargs.kv_cache_memory_bytes=134217728"]
    return subprocess.Popen(
        [*command, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def _first_line(process: subprocess.Popen[str]) -> str:
    """What it prints first on stdout; its end makes this "" and shows its errors."""
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.terminate)
    timer.start()
    try:
        line = process.stdout.readline()
    finally:
        timer.cancel()
    if not line:
        _, errors = process.communicate(timeout=STOP_S)
        pytest.fail(f"pageray serve ended:\n{errors[-4000:]}")
    return line


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _descendants(root: int) -> list[int]:
    found: list[int] = []
    frontier = [root]
    while frontier:
        children = _children(frontier.pop())
        found += children
        frontier += children
    return found


def _children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as stream:
        return [int(child) for child in stream.read().split()]


def _command_line(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline") as stream:
            return stream.read()
    except OSError:
        return ""


def _is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
