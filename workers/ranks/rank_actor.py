# pyright: basic
# Remote handles are typed by Ray at run time only; this file is the boundary.
"""Ranks as Ray actors in the placement group of the replica that owns the engine."""

import contextlib
import os
import signal
import threading
from typing import cast

import msgspec
import ray
import ray.exceptions
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import EngineDeadError
from pageray.workers.ranks.launcher import RankProcess
from pageray.workers.ranks.messages import RankSpec, encode

START_TIMEOUT_S = 120.0


@ray.remote
class RankActor:
    """The process around `run_rank`."""

    def locate(self) -> tuple[str, int]:
        """(node id, process id) of this actor."""
        return ray.get_runtime_context().get_node_id(), os.getpid()

    def run(self, spec: bytes) -> None:
        """Serve steps on a thread of its own until the engine stops or dies; returns at once."""
        # Ray pickles this class, and with it every global it names: a decoder cannot be.
        from pageray.workers.ranks.messages import decode_rank_spec
        from pageray.workers.ranks.rank_process import run_rank

        self._thread = threading.Thread(
            target=run_rank, args=(decode_rank_spec(spec),), name="rank", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)


class RayLauncher:
    """Starts rank r in bundle r + 1 of the current placement group; bundle 0 is the replica's.

    Without a placement group (an engine outside a replica) the actors go to this node.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config

    def launch(self, specs: list[RankSpec]) -> list[RankProcess]:
        group = ray.util.get_current_placement_group()
        actors = [self._create(spec, group) for spec in specs]
        try:
            places: list[tuple[str, int]] = ray.get(
                [actor.locate.remote() for actor in actors], timeout=START_TIMEOUT_S
            )
        except (ray.exceptions.RayError, TimeoutError) as error:
            for actor in actors:
                ray.kill(actor)
            raise EngineDeadError(f"The rank actors did not start: {error}") from error
        here = ray.get_runtime_context().get_node_id()
        for spec, (node, _) in zip(specs, places, strict=True):
            if node != here:
                for actor in actors:
                    ray.kill(actor)
                raise EngineDeadError(
                    f"Rank {spec.rank} was placed on node {node}, its engine is on {here}. The "
                    "ranks of an engine share memory with it: use placement strategy STRICT_PACK."
                )
        for spec, actor in zip(specs, actors, strict=True):
            # Ray shows each actor only the device it was given.
            actor.run.remote(encode(msgspec.structs.replace(spec, device_index=0)))
        return [_RayProcess(actor, pid) for actor, (_, pid) in zip(actors, places, strict=True)]

    def _create(self, spec: RankSpec, group: PlacementGroup | None) -> ActorHandle:
        options: dict[str, object] = {
            "num_cpus": 0,
            "max_restarts": 0,
        }
        if self._config.device != "cpu" and group is not None and _has_gpu(group, spec.rank + 1):
            options["num_gpus"] = 1
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group,
                placement_group_bundle_index=min(spec.rank + 1, len(_bundles(group)) - 1),
            )
        return cast("ActorHandle", RankActor.options(**options).remote())


class _RayProcess:
    def __init__(self, actor: ActorHandle, pid: int) -> None:
        self._actor = actor
        self.pid = pid
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            self._pidfd = None

    def join(self, timeout_s: float) -> None:
        # An actor outlives its work. A call that comes back after the rank's thread has ended
        # says that the work is over.
        ray.wait([self._actor.join.remote(timeout_s)], timeout=timeout_s)

    def stop(self) -> None:
        ray.kill(self._actor)
        # Ray asks the process to end, which one that is stopped does not hear.
        if self._pidfd is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            self._pidfd = None


def _has_gpu(group: PlacementGroup, bundle: int) -> bool:
    bundles = _bundles(group)
    return bundle < len(bundles) and bundles[bundle].get("GPU", 0) > 0


def _bundles(group: PlacementGroup) -> list[dict[str, float]]:
    return cast("list[dict[str, float]]", group.bundle_specs)
