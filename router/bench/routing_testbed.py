"""Applications on one Ray cluster, one after the other, for `pageray bench routing`."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from pageray.cluster.coordinator.coordinator_client import CoordinatorClient
from pageray.cluster.errors import ServerError
from pageray.router.bench.routing_client import RoutingClient
from pageray.router.bench.routing_load import cold_requests
from pageray.router.bench.routing_policies import RoutingPolicy
from pageray.router.builder import deployment_name
from pageray.router.ray_cluster import RayCluster
from pageray.router.serve_plan import make_plan
from pageray.router.serving import start_serving
from pageray.router.wire import ModelFacts, decode_facts

CONFIG = "cpu-2x1"
MODEL = "smollm2-135m"
_TIMEOUT_S, _POLL_S = 120.0, 0.1
"""An application answers as soon as one engine does; the others follow."""
_MAX_WARM_UPS = 5
_WARM_UP_REQUESTS, _WARM_UP_LEN, _WARM_UP_TOKENS = 3, 128, 4
"""For each engine."""


@dataclass(frozen=True)
class EngineCounts:
    """What one engine says of itself, since its start."""

    num_computed_tokens: int
    num_pulled_blocks: int
    num_failed_pulls: int

    def since(self, before: "EngineCounts") -> "EngineCounts":
        """Raises ValueError if these are counts of two different engines."""
        if self.num_computed_tokens < before.num_computed_tokens:
            raise ValueError(
                f"An engine had computed {before.num_computed_tokens} tokens and now has "
                f"{self.num_computed_tokens}: it is another one."
            )
        return EngineCounts(
            self.num_computed_tokens - before.num_computed_tokens,
            self.num_pulled_blocks - before.num_pulled_blocks,
            self.num_failed_pulls - before.num_failed_pulls,
        )


class RoutingApp:
    """One running application: `num_replicas` engines behind one ingress."""

    def __init__(self, name: str, base_url: str, num_replicas: int) -> None:
        self.name = name
        self.num_replicas = num_replicas
        self._base_url = base_url
        self._handle = cast(
            "DeploymentHandle[object]", serve.get_deployment_handle(deployment_name(MODEL), name)
        )

    def client(self) -> RoutingClient:
        """For one event loop; its caller closes it."""
        return RoutingClient(self._base_url, MODEL)

    async def facts(self) -> ModelFacts:
        response = cast(
            "DeploymentResponse[bytes]", self._handle.options(method_name="facts").remote()
        )
        return decode_facts(await response)

    async def counts(self) -> list[EngineCounts]:
        """Of every engine, at every call in the same order: Serve keeps its list of replicas in
        that order as long as it is the same replicas."""
        replies = await self._stats()
        if len(replies) != self.num_replicas:
            raise ServerError(f"{len(replies)} of {self.num_replicas} engines are there.")
        return [
            EngineCounts(
                num_computed_tokens=reply["num_computed_tokens"],
                num_pulled_blocks=reply["num_pulled_blocks"],
                num_failed_pulls=reply["num_failed_pulls"],
            )
            for reply in replies
        ]

    async def wait_until_complete(self) -> None:
        """Until every engine is there; raises `ServerError` when that takes long."""

        async def count() -> int:
            return len(await self._stats())

        await self._wait_for_all(count, "are there")

    async def wait_until_joined(self) -> None:
        """Until the coordinator knows every engine; raises `ServerError` when that takes long."""
        coordinator = CoordinatorClient(self.name)
        root_key = (await self.facts()).root_key

        async def count() -> int:
            return len((await coordinator.locate(root_key, ())).engines)

        await self._wait_for_all(count, "have joined")

    async def warm_up(self) -> None:
        """Prompts that nobody asks for again, until every engine has computed some.

        One after the other: at once they could leave a router that remembers with a lopsided
        picture to begin with.
        """
        client = self.client()
        try:
            for turn in range(_MAX_WARM_UPS):
                count = _WARM_UP_REQUESTS * self.num_replicas
                requests = cold_requests(count, _WARM_UP_LEN, _WARM_UP_TOKENS, f"warm up {turn}")
                answers = await client.run_closed(requests, 1, lambda: None)
                failures = [answer.failure for answer in answers if answer.failure is not None]
                if failures:
                    raise ServerError(f"The warm-up failed: {failures[0]}")
                if all(counts.num_computed_tokens for counts in await self.counts()):
                    return
        finally:
            await client.close()

    async def _stats(self) -> list[dict[str, int]]:
        replies = await self._handle.broadcast("record_routing_stats").results_async()
        return cast("list[dict[str, int]]", replies)

    async def _wait_for_all(self, count: Callable[[], Awaitable[int]], what: str) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _TIMEOUT_S
        while (num_ready := await count()) != self.num_replicas:
            if loop.time() > deadline_s:
                raise ServerError(f"{num_ready} of {self.num_replicas} engines {what}.")
            await asyncio.sleep(_POLL_S)


class RoutingTestbed:
    """Deploys on a started cluster; every application gets a name that none had before."""

    def __init__(
        self, cluster: RayCluster, port: int, num_replicas: int, settings: tuple[str, ...]
    ) -> None:
        """`settings`: as under `--set` of `pageray serve`, for every application."""
        self._cluster = cluster
        self._port = port
        self._num_replicas = num_replicas
        self._settings = settings
        self._numbers = itertools.count(1)

    @contextmanager
    def deployed(self, policy: RoutingPolicy) -> Generator[RoutingApp]:
        """Answering when entered, with every engine joined and warm; gone when left."""
        name = f"routing-{next(self._numbers)}"
        settings = (
            f"applications.0.name={name}",
            f"deployment_config.num_replicas={self._num_replicas}",
            *self._settings,
            *policy.settings,
        )
        plan = make_plan(CONFIG, settings, None, self._port)
        start_serving(self._cluster, plan)
        try:
            app = RoutingApp(name, f"http://{plan.client_host}:{plan.port}", self._num_replicas)
            asyncio.run(_prepare(app, policy))
            yield app
        finally:
            serve.delete(name)


async def _prepare(app: RoutingApp, policy: RoutingPolicy) -> None:
    await app.wait_until_complete()
    if policy.has_coordinator:
        await app.wait_until_joined()
    await app.warm_up()
