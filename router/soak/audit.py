# pyright: basic
# Ray describes placement groups in untyped dicts; this file is the boundary.
"""What must be true once a soak test's load has ended."""

import asyncio
import time
from typing import cast

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.util.placement_group import placement_group_table

SETTLE_S = 120.0
_LIVE_STATES = ("CREATED", "PENDING", "RESCHEDULING")


async def wait_until_idle(app_name: str, deployment: str, num_replicas: int) -> list[str]:
    """Complaints about what is still held `SETTLE_S` after the load; [] when all is as it was.

    Every replica is there again, no engine holds a block, and there are as many placement groups
    as replicas.
    """
    handle = cast("DeploymentHandle[object]", serve.get_deployment_handle(deployment, app_name))
    deadline = time.monotonic() + SETTLE_S
    while True:
        complaints = await _complaints(handle, num_replicas)
        if not complaints or time.monotonic() > deadline:
            return complaints
        await asyncio.sleep(0.5)


async def _complaints(handle: "DeploymentHandle[object]", num_replicas: int) -> list[str]:
    complaints: list[str] = []
    stats = cast(
        "list[dict[str, float]]",
        await handle.broadcast("record_routing_stats").results_async(),
    )
    if len(stats) != num_replicas:
        complaints.append(f"{len(stats)} of {num_replicas} replicas are there.")
    for number, of_engine in enumerate(stats):
        busy = {name: of_engine[name] for name in ("num_running", "num_waiting", "num_held_blocks")}
        if any(busy.values()):
            complaints.append(f"engine {number} is not idle: {busy}.")
    groups = cast("dict[str, dict[str, object]]", placement_group_table())
    live = [group for group in groups.values() if group["state"] in _LIVE_STATES]
    if len(live) != num_replicas:
        complaints.append(f"{len(live)} placement groups for {num_replicas} replicas.")
    return complaints
