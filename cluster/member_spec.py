"""Who an engine is in its application."""

from dataclasses import dataclass

from pageray.cluster.coordinator.messages import Role
from pageray.cluster.ids import EngineId


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    app_name: str
    engine_id: EngineId
    host: str = "127.0.0.1"
    """Address that other engines reach this one at."""
    role: Role = "both"
    moves_pages: bool = True
    """False: requests find this engine by its pages, but nobody pulls them and it pulls none."""
