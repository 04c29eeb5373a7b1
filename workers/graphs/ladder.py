"""For which steps graphs are captured: numbers of sequences by classes of length.

A captured launch keeps its grid, and the grid of the decode kernel depends on the batch's longest
sequence (`max_kv_len`): one program per split of its keys. With a single graph for the model's
longest sequence, 256 short sequences would launch over a hundred thousand programs per layer that
only find out that there is nothing for them, and a model of 131072 tokens would cut short
sequences into splits of 4096 keys, too few for a batch of one to fill the device. So there is a
graph for each class of lengths. Up to 16384 tokens all classes have the same split size as an
eager step, and attention gives the same bits; the surplus programs of a class, at most seven of
eight, return at once.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pageray.cluster.config import EngineConfig

_FIRST_CLASSES: tuple[int, ...] = (2048, 16384)
"""Four splits of 512 keys, and the most (32) that there are of that size."""
_LATER_FACTOR = 4
_AUTO_STEP = 8


@dataclass(frozen=True)
class GraphShape:
    """A graph takes up to `num_sequences` sequences of up to `max_kv_len` tokens each."""

    num_sequences: int
    max_kv_len: int


@dataclass(frozen=True)
class GraphLadder:
    """Both in ascending order."""

    sizes: tuple[int, ...]
    kv_classes: tuple[int, ...]

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "GraphLadder":
        sizes = config.cuda_graph_sizes
        if sizes == "auto":
            sizes = _auto_sizes(config.max_num_seqs)
        return cls(sizes, _kv_classes(max_model_len))

    def pick(self, num_sequences: int, max_kv_len: int) -> GraphShape | None:
        """The smallest graph that takes such a step; None if there is none."""
        size = _least_at_least(self.sizes, num_sequences)
        kv_class = _least_at_least(self.kv_classes, max_kv_len)
        return None if size is None or kv_class is None else GraphShape(size, kv_class)

    def shapes(self) -> Iterator[GraphShape]:
        """The largest first: later graphs find their memory in what it has taken."""
        for kv_class in reversed(self.kv_classes):
            for size in reversed(self.sizes):
                yield GraphShape(size, kv_class)

    def __len__(self) -> int:
        return len(self.sizes) * len(self.kv_classes)


def _auto_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8 below `max_num_seqs`, then that itself."""
    small = [size for size in (1, 2, 4) if size < max_num_seqs]
    return (*small, *range(_AUTO_STEP, max_num_seqs, _AUTO_STEP), max_num_seqs)


def _kv_classes(max_model_len: int) -> tuple[int, ...]:
    """Up to the model's longest sequence, which ends the last class."""
    classes = list(_FIRST_CLASSES)
    while classes[-1] < max_model_len:
        classes.append(classes[-1] * _LATER_FACTOR)
    return (*(length for length in classes if length < max_model_len), max_model_len)


def _least_at_least(ascending: Sequence[int], wanted: int) -> int | None:
    return next((value for value in ascending if value >= wanted), None)
