# pyright: basic
# Ray describes its nodes in untyped dicts; this file is the boundary.
"""Which replica of which application this process is."""

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from pageray.cluster.coordinator.messages import Role
from pageray.cluster.ids import EngineId
from pageray.cluster.member_spec import MemberSpec


def replica_place(role: Role = "both") -> MemberSpec | None:
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
    )


def _node_address() -> str:
    """Where the cluster reaches this node: the loopback interface, for a cluster that keeps to it.

    Ray's own `get_node_ip_address` names the machine's interface whatever the cluster uses.
    """
    here = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == here)
