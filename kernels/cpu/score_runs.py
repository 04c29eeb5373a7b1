"""scores_JW = K_JD Q_DW on matrix registers, with the queries kept in registers.

Legend: J keys in runs of REGISTER_ROWS, each at an address of its own; W queries, one register of
columns or two; D head dim.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.matrix_tile import (
    HAS_MATRIX_REGISTERS,
    MATRIX_DEPTH,
    NUM_MATRIX_REGISTERS,
    REGISTER_COLUMNS,
    REGISTER_ROWS,
    ProductValues,
    call_matrix,
    emit_product,
    register,
)
from pageray.kernels.cpu.vectors import I64, loop

_ROW_BYTES = 64
_BYTES = ir.IntType(8).as_pointer()
_ZERO, _ONE = ir.Constant(I64, 0), ir.Constant(I64, 1)
_KEY_REGISTERS = 2
_MAX_RUNS_AT_ONCE = 2


class _Scores:
    """Emits the code for one number of registers of columns."""

    def __init__(self, builder: Any, num_columns: int, args: tuple[ir.Value, ...]) -> None:
        runs_at, self._num_runs, self._num_steps, q_at, out_at = args
        self._builder = builder
        self._num_columns = num_columns
        self._width = num_columns * REGISTER_COLUMNS
        self._runs = builder.inttoptr(runs_at, I64.as_pointer())
        self._q_at, self._out_at = q_at, out_at
        self._row_bytes = ir.Constant(I64, self._width * 4)
        self._key_bytes = builder.mul(self._num_steps, ir.Constant(I64, _ROW_BYTES))

    def emit(self) -> None:
        """Queries of so many dims as fit stay; larger heads load them for every run."""
        builder = self._builder
        left = NUM_MATRIX_REGISTERS - _KEY_REGISTERS - _MAX_RUNS_AT_ONCE
        after = builder.append_basic_block("scores.end")
        large = builder.append_basic_block("scores.large")
        switch = builder.switch(self._num_steps, large)
        for num_steps in range(1, left // self._num_columns + 1):
            block = builder.append_basic_block(f"scores.{num_steps}")
            switch.add_case(ir.Constant(I64, num_steps), block)
            builder.position_at_end(block)
            self._emit_resident(num_steps)
            builder.branch(after)
        builder.position_at_end(large)
        loop(builder, _ZERO, self._num_runs, 1, [], self._large_run)
        builder.branch(after)
        builder.position_at_end(after)

    def _emit_resident(self, num_steps: int) -> None:
        """Registers: sums, then keys, then queries [step][column]."""
        builder = self._builder
        at_once = _MAX_RUNS_AT_ONCE // self._num_columns
        first_query = _MAX_RUNS_AT_ONCE + _KEY_REGISTERS
        queries = [
            [first_query + step * self._num_columns + column for column in range(self._num_columns)]
            for step in range(num_steps)
        ]
        for step, registers in enumerate(queries):
            for column, number in enumerate(registers):
                place = step * MATRIX_DEPTH // 2 * self._width * 4 + column * _ROW_BYTES
                at = self._pointer(builder.add(self._q_at, ir.Constant(I64, place)))
                call_matrix(builder, "tileloadd64", register(number), at, self._row_bytes)

        def some_runs(run: ir.Value, _: object) -> list[ir.Value]:
            for offset in range(at_once):
                self._run(builder.add(run, ir.Constant(I64, offset)), offset, queries)
            return []

        def one_run(run: ir.Value, _: object) -> list[ir.Value]:
            self._run(run, 0, queries)
            return []

        whole = builder.and_(self._num_runs, ir.Constant(I64, -at_once))
        loop(builder, _ZERO, whole, at_once, [], some_runs)
        loop(builder, whole, self._num_runs, 1, [], one_run)

    def _run(self, run: ir.Value, offset: int, queries: list[list[int]]) -> None:
        builder = self._builder
        sums = range(offset, offset + self._num_columns)
        for number in sums:
            call_matrix(builder, "tilezero", register(number))
        key_at = builder.load(builder.gep(self._runs, [run]))
        for step, registers in enumerate(queries):
            keys = _MAX_RUNS_AT_ONCE + (offset + step) % _KEY_REGISTERS
            at = self._pointer(builder.add(key_at, ir.Constant(I64, step * _ROW_BYTES)))
            call_matrix(builder, "tileloadd64", register(keys), at, self._key_bytes)
            for total, number in zip(sums, registers, strict=True):
                call_matrix(builder, "tdpbf16ps", register(total), register(keys), register(number))
        out_at = self._out_of(run)
        for column, number in enumerate(sums):
            at = self._pointer(builder.add(out_at, ir.Constant(I64, column * _ROW_BYTES)))
            call_matrix(builder, "tilestored64", register(number), at, self._row_bytes)

    def _large_run(self, run: ir.Value, _: object) -> list[ir.Value]:
        builder = self._builder
        num_pairs = builder.mul(self._num_steps, ir.Constant(I64, MATRIX_DEPTH // 2))
        values = ProductValues(
            x_at=builder.load(builder.gep(self._runs, [run])),
            x_stride=num_pairs,
            part_stride=_ZERO,
            num_parts=_ONE,
            w_at=self._q_at,
            depth=num_pairs,
            out_at=self._out_of(run),
            out_stride=ir.Constant(I64, self._width),
            adds=ir.Constant(ir.IntType(1), 0),
        )
        emit_product(builder, ir.Constant(I64, REGISTER_ROWS), self._num_columns, values)
        return []

    def _out_of(self, run: ir.Value) -> ir.Value:
        run_bytes = ir.Constant(I64, REGISTER_ROWS * self._width * 4)
        return self._builder.add(self._out_at, self._builder.mul(run, run_bytes))

    def _pointer(self, address: ir.Value) -> ir.Value:
        return self._builder.inttoptr(address, _BYTES)


def _typing(  # Numba passes arguments by position
    _: object,
    runs_at: types.Type,
    num_runs: types.Type,
    head_dim: types.Type,
    q_at: types.Type,
    width: types.Type,
    out_at: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(runs_at, num_runs, head_dim, q_at, width, out_at)

    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        if HAS_MATRIX_REGISTERS:
            runs_at, num_runs, head_dim, q_at, width, out_at = args
            num_steps = builder.sdiv(head_dim, ir.Constant(I64, MATRIX_DEPTH))
            values = (runs_at, num_runs, num_steps, q_at, out_at)
            is_narrow = builder.icmp_signed("<=", width, ir.Constant(I64, REGISTER_COLUMNS))
            with builder.if_else(is_narrow) as (narrow, wide):
                with narrow:
                    _Scores(builder, 1, values).emit()
                with wide:
                    _Scores(builder, 2, values).emit()
        return context.get_dummy_value()

    return signature, lower


score_runs = cast("Callable[[int, int, int, int, int, int], None]", intrinsic(_typing))
"""(address of runs, num_runs, head_dim, q address, width, out address).

out_JW, float32 and dense, = keys times queries. `runs` holds the addresses of every REGISTER_ROWS
keys, bfloat16 [REGISTER_ROWS, D] each; q is in pairs, [D / 2, W]; W is one register's columns or two,
D a multiple of MATRIX_DEPTH. The registers must have been taken for whole ones.
"""
