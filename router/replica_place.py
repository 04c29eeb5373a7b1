"""Which replica of which application this process is."""

from typing import cast

import ray.util
from ray import serve
from ray.serve.exceptions import RayServeException

from pageray.cluster.ids import EngineId
from pageray.cluster.member_spec import MemberSpec


def replica_place() -> MemberSpec | None:
    """None outside of a Serve replica. An engine has its replica's id, which is never used again."""
    try:
        context = serve.get_replica_context()
    except RayServeException:
        return None
    return MemberSpec(
        app_name=context.app_name,
        engine_id=EngineId(context.replica_id.unique_id),
        host=cast("str", ray.util.get_node_ip_address()),
    )
