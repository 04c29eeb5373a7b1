# pyright: basic
# Ray describes its nodes in untyped dicts; this file is the boundary.
"""Which replica of which application this process is."""

import logging

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from pageray.cluster.coordinator.coordinator_client import CoordinatorClient
from pageray.cluster.coordinator.errors import CoordinatorUnavailableError
from pageray.cluster.coordinator.messages import Role
from pageray.cluster.ids import EngineId
from pageray.cluster.member_spec import MemberSpec

logger = logging.getLogger(__name__)


def replica_place(role: Role = "both", *, moves_pages: bool = True) -> MemberSpec | None:
    """None outside of a Serve replica. An engine has its replica's id, which is never used again."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return MemberSpec(
        app_name=context.app_name,
        engine_id=EngineId(context.replica_id.unique_id),
        host=_node_address(),
        role=role,
        moves_pages=moves_pages,
    )


async def wake_coordinator(spec: MemberSpec | None) -> None:
    """Start the application's coordinator if there is none: it takes seconds, which the engine
    takes too."""
    if spec is None:
        return
    try:
        await CoordinatorClient(spec.app_name).secret()
    except CoordinatorUnavailableError as error:
        logger.warning("The coordinator does not start: %s", error)


def _node_address() -> str:
    """Where the cluster reaches this node: the loopback interface, for a cluster that keeps to it.

    Ray's own `get_node_ip_address` names the machine's interface whatever the cluster uses.
    """
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
