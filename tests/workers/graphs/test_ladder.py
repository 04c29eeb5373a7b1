import pytest

from pageray.cluster.config import EngineConfig
from pageray.workers.graphs.ladder import GraphLadder, GraphShape


def ladder(max_num_seqs: int, max_model_len: int, **settings: object) -> GraphLadder:
    values = {"model": "m", "max_num_seqs": max_num_seqs, **settings}
    return GraphLadder.of(EngineConfig.from_mapping(values), max_model_len)


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [
        (1, (1,)),
        (4, (1, 2, 4)),
        (6, (1, 2, 4, 6)),
        (8, (1, 2, 4, 8)),
        (27, (1, 2, 4, 8, 16, 24, 27)),
    ],
)
def test_automatic_sizes_end_with_the_most_sequences(
    max_num_seqs: int, sizes: tuple[int, ...]
) -> None:
    assert ladder(max_num_seqs, 100).sizes == sizes


@pytest.mark.parametrize(
    ("max_model_len", "classes"),
    [
        (100, (100,)),
        (2048, (2048,)),
        (8192, (2048, 8192)),
        (16384, (2048, 16384)),
        (131072, (2048, 16384, 65536, 131072)),
    ],
)
def test_length_classes_end_with_the_longest_sequence(
    max_model_len: int, classes: tuple[int, ...]
) -> None:
    assert ladder(1, max_model_len).kv_classes == classes


def test_a_step_gets_the_smallest_graph_that_takes_it() -> None:
    graphs = ladder(20, 4000, cuda_graph_sizes=[1, 3, 12])
    assert graphs.pick(1, 1) == GraphShape(1, 2048)
    assert graphs.pick(2, 2048) == GraphShape(3, 2048)
    assert graphs.pick(12, 2049) == GraphShape(12, 4000)
    assert graphs.pick(13, 5) is None
    assert graphs.pick(2, 4001) is None


def test_the_largest_is_captured_first_and_none_is_missing() -> None:
    graphs = ladder(4, 4000)
    shapes = list(graphs.shapes())
    assert shapes[0] == GraphShape(4, 4000)
    assert shapes[-1] == GraphShape(1, 2048)
    assert len(shapes) == len(set(shapes)) == len(graphs) == 6
