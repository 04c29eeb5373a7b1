"""Placement without knowledge: Serve sends a request to the less busy of two replicas."""

from pageray.cluster.coordinator.messages import EngineInfo
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import EngineId


class AnywhereAssignment:
    ranking: tuple[EngineId, ...] = ()
    pull_from: EngineInfo | None = None
    pull_num_blocks: int = 0

    def accepted_by(self, engine_id: EngineId) -> None:
        """Nobody counts."""

    def first_token(self) -> None:
        """Nobody counts."""

    def close(self) -> None:
        """Nobody counts."""


class AnywherePlacer:
    async def place(self, request: GenerateRequest) -> AnywhereAssignment:
        return AnywhereAssignment()
