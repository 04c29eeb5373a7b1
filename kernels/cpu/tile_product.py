"""out += x w for a tile that stays in registers: the inner loop of every product on the CPU.

The register blocking is that of Goto and van de Geijn (2008, doi:10.1145/1356052.1356053): a tile
of `num_rows` rows by PANEL columns is summed in registers while the loop runs along the depth;
each step loads PANEL weights once and broadcasts one number of each row.

Shapes: x_MK rows of float32, w_KN rows of PANEL elements in any storage, out_MN float32. Where w
holds pairs of bfloat16 (int32), x does too, and K counts pairs.
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
    broadcast,
    code_for_each_count,
    is_pair,
    load_float_vector,
    load_vector,
    loop,
    multiply_add,
    multiply_add_pairs,
    prefetch,
    storage_bytes,
    storage_type,
    store_float_vector,
    zeros,
)

_VECTORS = 2
PANEL = _VECTORS * LANES
"""Columns of a tile."""
HALF_PANEL = LANES
MAX_ROWS = min(8, (NUM_REGISTERS - 4) // _VECTORS)
"""Rows of a tile: its sums, a row of weights and a broadcast number fill 16 registers. Of 32 only
half are taken: from nine rows on their addresses no longer fit the general registers of x86-64."""
_UNROLL = 4
_MIN_SUMS = 8
"""Sums that are in flight at once, so that the latency of one addition hides behind the others."""

_LINE_BYTES = 64
_PREFETCH_BYTES = 3072
"""How far ahead weights are asked for. The machine's own prefetching ends with a 4 KiB page; with
this a product of few rows comes nearer to the memory's speed. A wrong address does no harm."""

# llvmlite has no types of its own for values; this name stands for them inside this file.
_Value = Any
_Sums = list[list[_Value]]
"""[row][vector]."""


class _Loop:
    """Emits the code for one number of rows."""

    def __init__(self, builder: Any, cell: Any, num_rows: int, args: tuple[ir.Value, ...]) -> None:
        self._builder = builder
        self._cell = cell
        self._num_rows = num_rows
        x_at, self._x_stride, w_at, self._w_stride, self._depth, out_at, self._out_stride = args
        pairs = is_pair(cell)
        self._multiply_add = multiply_add_pairs if pairs else multiply_add
        self._x = builder.inttoptr(x_at, (I32 if pairs else F32).as_pointer())
        self._w = builder.inttoptr(w_at, storage_type(cell).as_pointer())
        self._out = builder.inttoptr(out_at, F32.as_pointer())

    def emit(self) -> None:
        builder = self._builder
        num_chains = max(1, min(_UNROLL, _MIN_SUMS // (self._num_rows * _VECTORS)))
        first = [
            [load_float_vector(builder, self._out_at(row, vector)) for vector in range(_VECTORS)]
            for row in range(self._num_rows)
        ]
        empty: _Sums = [[zeros() for _ in range(_VECTORS)] for _ in range(self._num_rows)]
        chains: list[_Sums] = [first, *([empty] * (num_chains - 1))]
        whole = builder.and_(self._depth, ir.Constant(I64, -_UNROLL))
        chains = self._run(ir.Constant(I64, 0), whole, _UNROLL, chains)
        sums = chains[0]
        for other in chains[1:]:
            sums = [
                [builder.fadd(a, b) for a, b in zip(*rows, strict=True)]
                for rows in zip(sums, other, strict=True)
            ]
        (sums,) = self._run(whole, self._depth, 1, [sums])
        for row, vectors in enumerate(sums):
            for index, vector in enumerate(vectors):
                store_float_vector(builder, vector, self._out_at(row, index))

    def _run(self, start: ir.Value, stop: ir.Value, step: int, chains: list[_Sums]) -> list[_Sums]:
        """A loop over the depth; step u of an iteration adds to chain u modulo their number."""
        builder = self._builder

        def body(k: ir.Value, vectors: list[ir.Value]) -> list[ir.Value]:
            sums = self._grouped(vectors)
            if step > 1:
                self._prefetch(k)
            for u in range(step):
                chain = u % len(sums)
                sums[chain] = self._step(builder.add(k, ir.Constant(I64, u)), sums[chain])
            return _flat(sums)

        return self._grouped(loop(builder, start, stop, step, _flat(chains), body))

    def _grouped(self, vectors: list[ir.Value]) -> list[_Sums]:
        """The inverse of `_flat`."""
        rows = [vectors[at : at + _VECTORS] for at in range(0, len(vectors), _VECTORS)]
        return [rows[at : at + self._num_rows] for at in range(0, len(rows), self._num_rows)]

    def _prefetch(self, k: ir.Value) -> None:
        """Ask for the weights that some later iteration loads."""
        builder = self._builder
        w_at = builder.gep(self._w, [builder.mul(k, self._w_stride)])
        num_bytes = _UNROLL * PANEL * storage_bytes(self._cell)
        for line in range(0, num_bytes, _LINE_BYTES):
            prefetch(builder, w_at, _PREFETCH_BYTES + line)

    def _step(self, k: ir.Value, sums: _Sums) -> _Sums:
        builder = self._builder
        w_at = builder.gep(self._w, [builder.mul(k, self._w_stride)])
        weights = [
            load_vector(builder, self._cell, builder.gep(w_at, [ir.Constant(I64, v * LANES)]))
            for v in range(_VECTORS)
        ]
        result: _Sums = []
        for row, vectors in enumerate(sums):
            x = broadcast(builder, builder.load(builder.gep(self._x_at(row), [k]), align=4))
            result.append(
                [
                    self._multiply_add(builder, x, weight, vector)
                    for weight, vector in zip(weights, vectors, strict=True)
                ]
            )
        return result

    def _x_at(self, row: int) -> ir.Value:
        offset = self._builder.mul(self._x_stride, ir.Constant(I64, row))
        return self._builder.gep(self._x, [offset])

    def _out_at(self, row: int, vector: int) -> ir.Value:
        offset = self._builder.mul(self._out_stride, ir.Constant(I64, row))
        offset = self._builder.add(offset, ir.Constant(I64, vector * LANES))
        return self._builder.gep(self._out, [offset])


def _flat(chains: list[_Sums]) -> list[ir.Value]:
    return [vector for sums in chains for row in sums for vector in row]


def _emit(builder: Any, cell: Any, num_rows: int, args: tuple[ir.Value, ...]) -> None:
    _Loop(builder, cell, num_rows, args).emit()


_typed = code_for_each_count(MAX_ROWS, _emit)


def _typing(  # Numba passes arguments by position
    _: object,
    num_rows: types.Type,
    x_at: types.Type,
    x_stride: types.Type,
    w_at: types.Type,
    w_stride: types.Type,
    depth: types.Type,
    out_at: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    return _typed(num_rows, x_at, x_stride, w_at, w_stride, depth, out_at, out_stride)


tile_product = cast(
    "Callable[[int, int, int, Pointer, int, int, int, int], None]", intrinsic(_typing)
)
"""(num_rows, x address, x stride, w pointer, w stride, depth, out address, out stride).

out[m, n] += sum over k < depth of x[m, k] * w[k, n], for m < num_rows <= MAX_ROWS and n < PANEL.
Addresses in bytes, strides of rows in elements. x is float32, or pairs if w is; out float32. For one row or two the sum
runs in several chains that are added at the end; from three rows on k runs in order.
"""
