"""Prompts shorter than a block have no keys; they must not upset the memory of others."""

from pageray.cluster.ids import BlockKey, EngineId
from pageray.cluster.predicted_placements import PredictedPlacements

ENGINE = EngineId("a")
KEY = BlockKey(b"k" * 32)


def test_a_request_without_keys_is_forgotten_as_quietly_as_any_other() -> None:
    predicted = PredictedPlacements(life_s=4.0)
    predicted.add(ENGINE, [KEY], 0.0)
    predicted.add(ENGINE, [], 1.0)
    assert predicted.longest_runs([KEY], 2.0) == {ENGINE: 1}
    assert predicted.longest_runs([KEY], 4.5) == {}
    assert predicted.longest_runs([KEY], 9.0) == {}
    assert predicted.num_keys == 0
