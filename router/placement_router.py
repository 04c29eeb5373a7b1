# pyright: basic
# Serve's request routers are typed by its private modules; this file is the boundary.
"""Serve's request router for engines: takes the order of engines that came with the request.

All thinking has been done before the call (`placer.py`): an exception in here would leave a
request hanging for ever, and waiting would hold up every other one.
"""

import logging
import random

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from pageray.cluster.ids import EngineId
from pageray.router.replica_board import board_of

logger = logging.getLogger(__name__)


class PlacementRouter(RequestRouter):
    """Replicas in the order of the request's `ranking`; without one, the least busy of two."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        if pending_request is not None:
            # All replicas are in the answer. Unless told to pause before asking again, Serve asks
            # without end while none of them can answer, and holds up the very loop they answer on.
            pending_request.routing_context.should_backoff = True
        ranked = ranking_of(pending_request)
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        chosen = [by_id.pop(engine_id) for engine_id in ranked if engine_id in by_id]
        rest = list(by_id.values())
        random.shuffle(rest)
        groups = [[replica] for replica in chosen]
        # Serve takes the one with the shorter queue out of a group.
        groups += [rest[start : start + 2] for start in range(0, len(rest), 2)]
        return groups

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        deployment = self._deployment_id
        board_of(deployment.app_name, deployment.name).update(
            EngineId(replica.replica_id.unique_id) for replica in replicas
        )


def ranking_of(pending_request: PendingRequest | None) -> tuple[str, ...]:
    """The order of engines that the caller of the handle asked for, best first; () if none."""
    if pending_request is None:
        return ()
    ranking = pending_request.kwargs.get("ranking", ())
    if not isinstance(ranking, tuple):
        logger.error("a request came with a ranking that is none: %r", ranking)
        return ()
    return ranking
