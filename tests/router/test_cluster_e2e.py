# pyright: basic
# Ray's test clusters are untyped.
"""Real engines on several Ray nodes of one machine: shared prefixes, exchanges, a lost node."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import openai
import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from pageray.router.builder import build_openai_app, deployment_name
from pageray.router.http_port import free_port

pytestmark = [pytest.mark.ray, pytest.mark.timeout(420)]

MODEL = f"smollm2.{os.getpid()}"
APPLICATION = "app"
PROMPT = "A list of words: " + " ".join(f"word{number}" for number in range(60))
NUM_TOKENS = 40
BOUND_S = 120.0


@dataclass
class Deployed:
    cluster: Cluster
    base_url: str


@pytest.fixture(scope="module")
def deployed() -> Iterator[Deployed]:
    """A head node for the router, and two nodes with room for one engine each."""
    port = free_port()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"head": 1}, "include_dashboard": False},
    )
    try:
        for _ in range(2):
            _add_engine_node(cluster)
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        _deploy(seed=0)
        yield Deployed(cluster, f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def calm_text(deployed: Deployed) -> str:
    return _complete(deployed.base_url, PROMPT)


def test_a_prefix_of_one_node_serves_the_other(deployed: Deployed, calm_text: str) -> None:
    """More at once than the engine with the pages should take: the other one pulls them."""
    _wait_until(lambda: _total("num_pulled_blocks") > 0, each_time=lambda: _burst(deployed, 10))
    assert _complete(deployed.base_url, PROMPT) == calm_text
    assert _total("num_failed_pulls") == 0


def test_a_rolling_update_loses_nothing(deployed: Deployed, calm_text: str) -> None:
    """Greedy streams run all the time; every replica is exchanged under them."""
    before = _engine_ids()
    _under_load(
        deployed,
        calm_text,
        lambda: _deploy(seed=1),
        until=lambda: len(_engine_ids()) == 2 and not _engine_ids() & before,
    )
    assert _total("num_pulled_blocks") > 0, "running sequences should bring their pages along"


def test_a_lost_node_loses_nothing(deployed: Deployed, calm_text: str) -> None:
    before = _engine_ids()
    node = deployed.cluster.list_all_nodes()[-1]

    def lose_one_and_add_one() -> None:
        deployed.cluster.remove_node(node, allow_graceful=False)
        _add_engine_node(deployed.cluster)

    _under_load(
        deployed,
        calm_text,
        lose_one_and_add_one,
        until=lambda: len(_engine_ids()) == 2 and _engine_ids() != before,
    )


def _add_engine_node(cluster: Cluster) -> None:
    cluster.add_node(num_cpus=1, resources={"engine": 1})


def _deploy(seed: int) -> None:
    engine = {
        "model_loading_config": {"model_id": MODEL, "model_source": "smollm2-135m"},
        "engine_kwargs": {
            "device": "cpu",
            "dtype": "float32",
            "cpu_threads_per_rank": 1,
            "num_gpu_blocks_override": 200,
            "max_model_len": 1024,
            "seed": seed,
        },
        "placement_group_config": {"bundle_per_worker": {"CPU": 0.1, "engine": 1}},
        "deployment_config": {"num_replicas": 2},
    }
    # Clients talk to the ingress: one that is lost breaks its connections. Not so on this node.
    ingress = {"ray_actor_options": {"num_cpus": 0.1, "resources": {"head": 0.1}}}
    application = build_openai_app({"llm_configs": [engine], "ingress_deployment_config": ingress})
    serve.run(application, name=APPLICATION)


def _under_load(
    deployed: Deployed, expected: str, action: Callable[[], None], until: Callable[[], bool]
) -> None:
    """Do something while clients stream, and go on until it has had its effect."""
    is_over = threading.Event()

    def keep_streaming() -> int:
        count = 0
        while not is_over.is_set():
            assert _complete(deployed.base_url, PROMPT) == expected
            count += 1
        return count

    with ThreadPoolExecutor() as executor:
        streams = [executor.submit(keep_streaming) for _ in range(3)]
        try:
            action()
            _wait_until(until)
        finally:
            is_over.set()
        assert sum(stream.result() for stream in streams) >= 3


def _complete(base_url: str, prompt: str) -> str:
    client = openai.OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=0, timeout=300)
    stream = client.completions.create(
        model=MODEL,
        prompt=prompt,
        max_tokens=NUM_TOKENS,
        temperature=0,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    return "".join(chunk.choices[0].text for chunk in stream if chunk.choices)


def _burst(deployed: Deployed, count: int) -> None:
    with ThreadPoolExecutor(count) as executor:
        prompts = [f"{PROMPT} {number}" for number in range(count)]
        list(executor.map(lambda prompt: _complete(deployed.base_url, prompt), prompts))


def _handle() -> "DeploymentHandle[object]":
    return cast(
        "DeploymentHandle[object]",
        serve.get_deployment_handle(deployment_name(MODEL), APPLICATION),
    )


def _total(name: str) -> float:
    stats = cast(
        "list[dict[str, float]]",
        _handle().broadcast("record_routing_stats").results(timeout_s=BOUND_S),
    )
    return sum(of_engine[name] for of_engine in stats)


def _engine_ids() -> set[str]:
    try:
        return set(_handle().broadcast("engine_id").results(timeout_s=BOUND_S))
    except RayError:
        return set()  # one of them is just ending


def _wait_until(
    condition: Callable[[], bool], each_time: Callable[[], None] = lambda: time.sleep(0.2)
) -> None:
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        each_time()
