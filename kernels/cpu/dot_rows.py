"""out = q k^T for a few query rows against keys as they lie in a page.

With few rows it does not pay to turn the keys round, as `tile_product` would need them: every
(row, key) pair is summed across the head dim in a register of its own, and registers are added up
across their lanes four keys at a time.

Shapes: q_MD float32 rows, k_JD any storage, out_MJ float32; D a multiple of LANES.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.memory import Pointer
from pageray.kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    NUM_REGISTERS,
    code_for_each_count,
    load_float_vector,
    load_vector,
    loop,
    multiply_add,
    storage_type,
    zeros,
)

_KEYS = 4
_FOUR = ir.VectorType(F32, _KEYS)
MAX_DOT_ROWS = (NUM_REGISTERS - 1) // (_KEYS + 1)
"""Rows at a time: each needs a register for its numbers and one for each key's sum."""


class _Dots:
    """Emits the code for one number of rows."""

    def __init__(self, builder: Any, cell: Any, num_rows: int, args: tuple[ir.Value, ...]) -> None:
        self._builder = builder
        self._cell = cell
        self._num_rows = num_rows
        q_at, self._q_stride, k_at, self._num_keys, self._depth, out_at, self._out_stride = args
        self._q = builder.inttoptr(q_at, F32.as_pointer())
        self._k = builder.inttoptr(k_at, storage_type(cell).as_pointer())
        self._out = builder.inttoptr(out_at, F32.as_pointer())

    def emit(self) -> None:
        whole = self._builder.and_(self._num_keys, ir.Constant(I64, -_KEYS))
        zero = ir.Constant(I64, 0)
        loop(self._builder, zero, whole, _KEYS, [], self._many_keys)
        loop(self._builder, whole, self._num_keys, 1, [], self._one_key)

    def _many_keys(self, key: ir.Value, _: object) -> list[ir.Value]:
        builder = self._builder
        for row, sums in enumerate(self._sums(key, _KEYS)):
            four = _add_lanes_of_four(builder, sums)
            at = builder.bitcast(self._out_at(row, key), _FOUR.as_pointer())
            builder.store(four, at, align=4)
        return []

    def _one_key(self, key: ir.Value, _: object) -> list[ir.Value]:
        builder = self._builder
        for row, (total,) in enumerate(self._sums(key, 1)):
            half = _to_four_lanes(builder, total)
            lanes = [builder.extract_element(half, ir.Constant(I32, i)) for i in range(_KEYS)]
            pairs = builder.fadd(lanes[0], lanes[1]), builder.fadd(lanes[2], lanes[3])
            builder.store(builder.fadd(*pairs), self._out_at(row, key), align=4)
        return []

    def _sums(self, key: ir.Value, num_keys: int) -> list[list[ir.Value]]:
        """[row][key] vectors whose lanes add up to the products of `num_keys` keys from `key` on."""
        builder = self._builder

        def body(d: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
            queries = [
                load_float_vector(builder, builder.gep(self._q_at(m), [d])) for m in self._rows()
            ]
            for index in range(num_keys):
                place = builder.mul(builder.add(key, ir.Constant(I64, index)), self._depth)
                k = load_vector(builder, self._cell, builder.gep(self._k, [builder.add(place, d)]))
                for m in self._rows():
                    at = m * num_keys + index
                    sums[at] = multiply_add(builder, queries[m], k, sums[at])
            return sums

        empty = [zeros()] * (self._num_rows * num_keys)
        sums = loop(builder, ir.Constant(I64, 0), self._depth, LANES, empty, body)
        return [sums[m * num_keys : (m + 1) * num_keys] for m in self._rows()]

    def _rows(self) -> range:
        return range(self._num_rows)

    def _q_at(self, row: int) -> ir.Value:
        offset = self._builder.mul(self._q_stride, ir.Constant(I64, row))
        return self._builder.gep(self._q, [offset])

    def _out_at(self, row: int, key: ir.Value) -> ir.Value:
        offset = self._builder.mul(self._out_stride, ir.Constant(I64, row))
        return self._builder.gep(self._out, [self._builder.add(offset, key)])


def _shuffle(builder: Any, a: ir.Value, b: ir.Value, lanes: list[int]) -> ir.Value:
    mask = ir.Constant(ir.VectorType(I32, len(lanes)), lanes)
    return builder.shuffle_vector(a, b, mask)


def _to_four_lanes(builder: Any, vector: ir.Value) -> ir.Value:
    """Fold the upper half onto the lower one until four lanes are left."""
    width = LANES
    while width > _KEYS:
        width //= 2
        low = _shuffle(builder, vector, vector, list(range(width)))
        high = _shuffle(builder, vector, vector, list(range(width, 2 * width)))
        vector = builder.fadd(low, high)
    return vector


def _add_lanes_of_four(builder: Any, vectors: list[ir.Value]) -> ir.Value:
    """The sums of four vectors' lanes, side by side."""
    a, b, c, d = (_to_four_lanes(builder, vector) for vector in vectors)
    ab = builder.fadd(_shuffle(builder, a, b, [0, 4, 2, 6]), _shuffle(builder, a, b, [1, 5, 3, 7]))
    cd = builder.fadd(_shuffle(builder, c, d, [0, 4, 2, 6]), _shuffle(builder, c, d, [1, 5, 3, 7]))
    return builder.fadd(
        _shuffle(builder, ab, cd, [0, 1, 4, 5]), _shuffle(builder, ab, cd, [2, 3, 6, 7])
    )


def _emit(builder: Any, cell: Any, num_rows: int, args: tuple[ir.Value, ...]) -> None:
    _Dots(builder, cell, num_rows, args).emit()


_typed = code_for_each_count(MAX_DOT_ROWS, _emit)


def _typing(  # Numba passes arguments by position
    _: object,
    num_rows: types.Type,
    q_at: types.Type,
    q_stride: types.Type,
    k_at: types.Type,
    num_keys: types.Type,
    depth: types.Type,
    out_at: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    return _typed(num_rows, q_at, q_stride, k_at, num_keys, depth, out_at, out_stride)


dot_rows = cast("Callable[[int, int, int, Pointer, int, int, int, int], None]", intrinsic(_typing))
"""(num_rows, q address, q stride, k pointer, num_keys, head dim, out address, out stride).

out[m, j] = sum over d of q[m, d] * k[j, d], for m < num_rows <= MAX_DOT_ROWS and j < num_keys.
Addresses in bytes, strides of rows in elements; a key's elements follow those of the key before.
The head dim is a multiple of LANES.
"""
