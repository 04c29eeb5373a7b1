"""sums_MD += P_MJ V_JD for a few query rows, on vector registers.

Values are widened as they are loaded. Matrix registers would take them in pairs, from memory: with a
few rows, writing them there takes longer than all the products.

Legend: M rows, J tokens in runs of REGISTER_ROWS, each at an address of its own, D head dim. sums is
in the order of `pair_values.py`.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.matrix_tile import REGISTER_ROWS
from pageray.kernels.cpu.pair_values import PAIR_PANEL, widened_halves
from pageray.kernels.cpu.soften_rows import MAX_FEW_ROWS
from pageray.kernels.cpu.vectors import (
    F32,
    I64,
    LANES,
    broadcast,
    load_float_vector,
    loop,
    multiply_add,
    store_float_vector,
)

_UNROLL = 4
_ROWS_OF_TWO_PANELS = 4
"""So many rows have sums of two panels in registers."""
_ZERO = ir.Constant(I64, 0)
_WORD = ir.IntType(16)


class _Weighing:
    """Emits the code for one number of rows."""

    def __init__(self, builder: Any, num_rows: int, args: tuple[ir.Value, ...]) -> None:
        runs_at, self._num_runs, self._head_dim, weights_at, self._weights_stride, sums_at = args
        self._builder = builder
        self._num_rows = num_rows
        self._runs = builder.inttoptr(runs_at, I64.as_pointer())
        self._weights = builder.inttoptr(weights_at, F32.as_pointer())
        self._sums = builder.inttoptr(sums_at, F32.as_pointer())

    def emit(self) -> None:
        """Two panels of dims at a time if there are registers; the last one alone if it must."""
        whole = _ZERO
        if self._num_rows <= _ROWS_OF_TWO_PANELS:
            two = ir.Constant(I64, 2 * PAIR_PANEL)
            whole = self._builder.mul(self._builder.sdiv(self._head_dim, two), two)
            self._emit_panels(_ZERO, whole, 2)
        self._emit_panels(whole, self._head_dim, 1)

    def _emit_panels(self, start: ir.Value, stop: ir.Value, at_once: int) -> None:
        builder = self._builder

        def panels(first_dim: ir.Value, _: object) -> list[ir.Value]:
            places = [
                self._sum_at(row, first_dim, vector)
                for row in range(self._num_rows)
                for vector in range(2 * at_once)
            ]
            sums = [load_float_vector(builder, place) for place in places]

            def run(index: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                address = builder.load(builder.gep(self._runs, [index]))
                values = builder.gep(builder.inttoptr(address, _WORD.as_pointer()), [first_dim])
                first = builder.mul(index, ir.Constant(I64, REGISTER_ROWS))

                def tokens(token: ir.Value, carried: list[ir.Value]) -> list[ir.Value]:
                    for offset in range(_UNROLL):
                        slot = builder.add(token, ir.Constant(I64, offset))
                        carried = self._token(values, slot, first, at_once, carried)
                    return carried

                end = ir.Constant(I64, REGISTER_ROWS)
                return loop(builder, _ZERO, end, _UNROLL, carried, tokens)

            sums = loop(builder, _ZERO, self._num_runs, 1, sums, run)
            for place, vector in zip(places, sums, strict=True):
                store_float_vector(builder, vector, place)
            return []

        loop(builder, start, stop, at_once * PAIR_PANEL, [], panels)

    def _token(
        self,
        values: ir.Value,
        slot: ir.Value,
        first: ir.Value,
        at_once: int,
        sums: list[ir.Value],
    ) -> list[ir.Value]:
        """Sums are in the order rows, panels, halves."""
        builder = self._builder
        start = builder.mul(slot, self._head_dim)
        vectors: list[ir.Value] = []
        for panel in range(at_once):
            place = builder.add(start, ir.Constant(I64, panel * PAIR_PANEL))
            vectors.extend(widened_halves(builder, builder.gep(values, [place])))
        token = builder.add(first, slot)
        result: list[ir.Value] = []
        for row in range(self._num_rows):
            weight = broadcast(builder, self._weight(row, token))
            for number, vector in enumerate(vectors):
                total = sums[row * len(vectors) + number]
                result.append(multiply_add(builder, vector, weight, total))
        return result

    def _weight(self, row: int, token: ir.Value) -> ir.Value:
        start = self._builder.mul(self._weights_stride, ir.Constant(I64, row))
        at = self._builder.gep(self._weights, [self._builder.add(start, token)])
        return self._builder.load(at, align=4)

    def _sum_at(self, row: int, first_dim: ir.Value, vector: int) -> ir.Value:
        builder = self._builder
        start = builder.mul(self._head_dim, ir.Constant(I64, row))
        place = builder.add(first_dim, ir.Constant(I64, vector * LANES))
        return builder.gep(self._sums, [builder.add(start, place)])


def _typing(  # Numba passes arguments by position
    _: object,
    num_rows: types.Type,
    runs_at: types.Type,
    num_runs: types.Type,
    head_dim: types.Type,
    weights_at: types.Type,
    weights_stride: types.Type,
    sums_at: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(
        num_rows, runs_at, num_runs, head_dim, weights_at, weights_stride, sums_at
    )

    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        num_rows, *values = args
        after = builder.append_basic_block("weigh.end")
        switch = builder.switch(num_rows, after)
        for count in range(1, MAX_FEW_ROWS + 1):
            block = builder.append_basic_block(f"weigh.{count}")
            switch.add_case(ir.Constant(I64, count), block)
            builder.position_at_end(block)
            _Weighing(builder, count, tuple(values)).emit()
            builder.branch(after)
        builder.position_at_end(after)
        return context.get_dummy_value()

    return signature, lower


weigh_values = cast("Callable[[int, int, int, int, int, int, int], None]", intrinsic(_typing))
"""(num_rows, address of runs, num_runs, head_dim, weights address, their stride, sums address).

sums[m, d] += sum over the tokens of all runs of weights[m, j] * values[j, d], for
num_rows <= MAX_FEW_ROWS. weights are float32; values are bfloat16 [REGISTER_ROWS, D] at each run's
address; D is a multiple of PAIR_PANEL.
"""
