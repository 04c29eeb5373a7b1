"""When a request should move from one engine to another."""

from pageray.cluster.block_keys import root_key
from pageray.cluster.coordinator.messages import EngineInfo, EngineLoad, EngineView
from pageray.cluster.ids import EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout
from pageray.cluster.rebalance import Move, pick_move


def engine(name: str, num_running: int, num_waiting: int, model: str = "m") -> EngineView:
    layout = PoolLayout(num_layers=1, block_size=4, head_dim=1, element_bytes=2, shards=((0, 1),))
    info = EngineInfo(
        engine_id=EngineId(name),
        epoch=Epoch(1),
        root_key=root_key(model, "f", 4),
        block_size=4,
        num_blocks=10,
        layout=layout,
    )
    load = EngineLoad(num_running=num_running, num_waiting=num_waiting)
    return EngineView(info=info, load=load)


def test_from_the_longest_queue_to_the_least_busy() -> None:
    views = [engine("a", 8, 2), engine("b", 8, 5), engine("c", 3, 0), engine("d", 1, 0)]
    assert pick_move(views) == Move(EngineId("b"), EngineId("d"))


def test_nothing_moves_without_a_queue_or_without_room() -> None:
    assert pick_move([]) is None
    assert pick_move([engine("a", 9, 0), engine("b", 0, 0)]) is None
    assert pick_move([engine("a", 8, 1), engine("b", 8, 1)]) is None


def test_a_move_is_not_one_that_would_be_undone() -> None:
    assert pick_move([engine("a", 1, 1), engine("b", 1, 0)]) is None
    assert pick_move([engine("a", 1, 2), engine("b", 1, 0)]) is not None


def test_only_between_engines_of_one_model() -> None:
    assert pick_move([engine("a", 8, 5), engine("b", 0, 0, model="other")]) is None
