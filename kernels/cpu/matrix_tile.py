"""out = x w for a tile that stays in matrix registers (Intel AMX), summed from bfloat16 pairs.

A matrix register holds up to 16 rows of 64 bytes: 16 x 32 bfloat16 of x, 16 x 16 pairs of w, or
16 x 16 float32 sums. One instruction multiplies the first two into the third. Two registers of x
and two of w meet in four of sums, so that each load serves two products: MAX_MATRIX_ROWS rows by
MAX_MATRIX_COLUMNS (Intel 64 and IA-32 Architectures Optimization Reference Manual, chapter on AMX).
Every row's sum runs in the same order, whatever rows are beside it.

Shapes: x_MPK bfloat16 with P parts that are summed (`matrix_product`: one), w_K2N pairs: element n of row k holds
w[2k, n] and w[2k + 1, n]; out_MN float32.
"""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.memory import Cell
from pageray.kernels.cpu.vectors import HOST_FEATURES, I64, LANES, declared, is_pair, loop, prefetch

REGISTER_ROWS = 16
"""Rows of a full register."""
_ROW_BYTES = 64
_SHAPE_BYTES = 64
MAX_MATRIX_ROWS = 2 * REGISTER_ROWS
REGISTER_COLUMNS = 16
MAX_MATRIX_COLUMNS = 2 * REGISTER_COLUMNS
MATRIX_DEPTH = 32
"""Inputs that one product sums; the depth is a multiple of it."""
_PAIRS = MATRIX_DEPTH // 2
_LINE_BYTES = 64
_PREFETCH_BYTES = 8192
"""How far ahead weights are asked for; see `tile_product.py`."""
# Numbers of registers: four of sums [rows][columns], two of x, two of w.
_SUMS = ((0, 1), (2, 3))
_X = (4, 5)
_W = (6, 7)
# The layout of what shapes the registers: bytes of a row (16 bits each), rows (8 bits each).
NUM_MATRIX_REGISTERS, _WIDTHS_AT, _HEIGHTS_AT = 8, 16, 48

_ARCH_PRCTL = 158
_ASK_FOR_STATE = 0x1023
_TILE_DATA = 18


def _may_use_matrix_registers() -> bool:
    """Ask Linux for them: their 8 KiB of state are kept only for processes that did."""
    if not HOST_FEATURES.get("amx-bf16") or LANES != REGISTER_ROWS or platform.system() != "Linux":
        return False
    return ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ASK_FOR_STATE, _TILE_DATA) == 0


HAS_MATRIX_REGISTERS = _may_use_matrix_registers()

_I8 = ir.IntType(8)
_BYTES = _I8.as_pointer()
_VOID = ir.VoidType()
_ZERO = ir.Constant(I64, 0)


def call_matrix(builder: Any, name: str, *args: Any) -> None:
    """LLVM's function for an instruction on matrix registers."""
    builder.call(declared(builder, f"llvm.x86.{name}", _VOID, [arg.type for arg in args]), args)


def register(number: int) -> ir.Constant:
    return ir.Constant(_I8, number)


def _take(_: object, num_rows: types.Type) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, __: Any, args: tuple[ir.Value, ...]) -> Any:
        if HAS_MATRIX_REGISTERS:
            _shape_registers(builder, args[0])
        return context.get_dummy_value()

    return cast("Any", types.void)(num_rows), lower


def _shape_registers(builder: Any, num_rows: ir.Value) -> None:
    """Registers of w are full; those of x and of sums have so many rows, or all."""
    full = ir.Constant(I64, REGISTER_ROWS)
    # A register without rows is a fault to the processor.
    one = ir.Constant(I64, 1)
    num_rows = builder.select(builder.icmp_signed("<", num_rows, one), one, num_rows)
    num_rows = builder.select(builder.icmp_signed("<", num_rows, full), num_rows, full)
    shape_type = ir.ArrayType(_I8, _SHAPE_BYTES)
    with builder.goto_entry_block():
        shape = builder.alloca(shape_type)
    constant = bytearray(_SHAPE_BYTES)
    constant[0] = 1
    for number in range(NUM_MATRIX_REGISTERS):
        constant[_WIDTHS_AT + 2 * number] = _ROW_BYTES
        constant[_HEIGHTS_AT + number] = REGISTER_ROWS
    builder.store(ir.Constant(shape_type, constant), shape)
    at = builder.bitcast(shape, _BYTES)
    for number in (*_SUMS[0], *_SUMS[1]):
        _store_height(builder, at, number, num_rows)
    for number in _X:
        _store_height(builder, at, number, num_rows)
    call_matrix(builder, "ldtilecfg", at)


def _store_height(builder: Any, shape_at: ir.Value, number: int, num_rows: ir.Value) -> None:
    place = builder.gep(shape_at, [ir.Constant(I64, _HEIGHTS_AT + number)])
    builder.store(builder.trunc(num_rows, _I8), place)


def _give_back(_: object) -> tuple[Any, Any]:
    def lower(context: Any, builder: Any, __: Any, ___: Any) -> Any:
        if HAS_MATRIX_REGISTERS:
            call_matrix(builder, "tilerelease")
        return context.get_dummy_value()

    return cast("Any", types.void)(), lower


@dataclass(frozen=True)
class Habit:
    """Where a product's operands come from."""

    asks_for_weights: bool = False
    """They come from memory, whose own prefetching ends with a page."""
    rows_pass: bool = False
    """Rows of x come from the second-level cache and shall not push w out of the first."""


@dataclass(frozen=True)
class ProductValues:
    """LLVM values: addresses in bytes; strides and depth in elements of 4 bytes."""

    x_at: ir.Value
    x_stride: ir.Value
    part_stride: ir.Value
    num_parts: ir.Value
    w_at: ir.Value
    depth: ir.Value
    out_at: ir.Value
    out_stride: ir.Value
    adds: ir.Value


Beside = Callable[[ir.Value], None]
"""Emits other work for a step of a product, which begins at that pair."""


class _Product:
    """Emits the code for one register of rows, or for two with the second from `second_row` on, and
    for so many registers of columns."""

    def __init__(
        self,
        builder: Any,
        second_row: ir.Value | None,
        num_columns: int,
        values: ProductValues,
        habit: Habit,
        beside: Beside | None,
    ) -> None:
        self._builder = builder
        self._habit = habit
        self._beside = beside
        self._rows = (_ZERO,) if second_row is None else (_ZERO, second_row)
        self._num_parts, self._depth, self._adds = values.num_parts, values.depth, values.adds
        self._x = builder.inttoptr(values.x_at, _BYTES)
        self._w = builder.inttoptr(values.w_at, _BYTES)
        self._out = builder.inttoptr(values.out_at, _BYTES)
        self._x_stride = self._times(values.x_stride, 4)
        self._out_stride = self._times(values.out_stride, 4)
        self._part_stride = self._times(values.part_stride, 4)
        self._num_columns = num_columns
        self._w_row_bytes = num_columns * _ROW_BYTES
        self._w_stride = ir.Constant(I64, self._w_row_bytes)

    def _times(self, value: ir.Value, factor: int) -> ir.Value:
        return self._builder.mul(value, ir.Constant(I64, factor))

    def emit(self) -> None:
        with self._builder.if_else(self._adds) as (added, alone):
            with added:
                self._for_each_sum("tileloadd64")
            with alone:
                for sums in _SUMS[: len(self._rows)]:
                    for number in sums[: self._num_columns]:
                        call_matrix(self._builder, "tilezero", register(number))
        loop(self._builder, _ZERO, self._depth, _PAIRS, [], self._step)
        self._for_each_sum("tilestored64")

    def _for_each_sum(self, instruction: str) -> None:
        """Load or store the sums at their places in out."""
        for row, sums in zip(self._rows, _SUMS, strict=False):
            start = self._builder.mul(self._out_stride, row)
            for column, number in enumerate(sums[: self._num_columns]):
                place = self._builder.add(start, ir.Constant(I64, column * _ROW_BYTES))
                at = self._builder.gep(self._out, [place])
                call_matrix(self._builder, instruction, register(number), at, self._out_stride)

    def _step(self, pair: ir.Value, _: object) -> list[ir.Value]:
        """Multiply MATRIX_DEPTH inputs: w meets the first part of x as it is loaded, then the
        others.

        Loads are spread between the products, each as late as it can be: with all of them first,
        a step takes a fifth longer (more so where x comes from the second-level cache).
        """
        builder = self._builder
        w_at = builder.gep(self._w, [self._times(pair, self._w_row_bytes)])
        if self._habit.asks_for_weights:
            for line in range(0, _PAIRS * self._w_row_bytes, _LINE_BYTES):
                prefetch(builder, w_at, _PREFETCH_BYTES + line)
        x_at = builder.gep(self._x, [self._times(pair, 4)])
        self._meet(x_at, w_at)

        def meet(part: ir.Value, _: object) -> list[ir.Value]:
            self._meet(builder.gep(x_at, [builder.mul(part, self._part_stride)]), None)
            return []

        loop(builder, ir.Constant(I64, 1), self._num_parts, 1, [], meet)
        if self._beside is not None:
            self._beside(pair)
        return []

    def _meet(self, x_at: ir.Value, w_at: ir.Value | None) -> None:
        """Products of a part of x, and of w, which is loaded from an address or still there."""
        self._load_rows(0, x_at)
        columns = list(range(self._num_columns))
        for column in columns:
            if w_at is not None:
                at = self._builder.gep(w_at, [ir.Constant(I64, column * _ROW_BYTES)])
                call_matrix(self._builder, "tileloadd64", register(_W[column]), at, self._w_stride)
            self._multiply(0, column)
        if len(self._rows) > 1:
            self._load_rows(1, x_at)
            # Back: the register of w that was last used goes first.
            for column in reversed(columns):
                self._multiply(1, column)

    def _load_rows(self, index: int, x_at: ir.Value) -> None:
        at = self._builder.gep(x_at, [self._builder.mul(self._x_stride, self._rows[index])])
        instruction = "tileloaddt164" if self._habit.rows_pass else "tileloadd64"
        call_matrix(self._builder, instruction, register(_X[index]), at, self._x_stride)

    def _multiply(self, row: int, column: int) -> None:
        registers = (_SUMS[row][column], _X[row], _W[column])
        call_matrix(self._builder, "tdpbf16ps", *map(register, registers))


def emit_product(
    builder: Any,
    num_rows: ir.Value,
    num_columns: int,
    values: ProductValues,
    habit: Habit | None = None,
    beside: Beside | None = None,
) -> None:
    """Code for up to MAX_MATRIX_ROWS rows by so many registers of columns; `matrix_product` says
    what it computes."""
    habit = habit or Habit()
    full = ir.Constant(I64, REGISTER_ROWS)
    with builder.if_else(builder.icmp_signed("<=", num_rows, full)) as (one, two):
        with one:
            _Product(builder, None, num_columns, values, habit, beside).emit()
        with two:
            second_row = builder.sub(num_rows, full)
            _Product(builder, second_row, num_columns, values, habit, beside).emit()


def _matrix_product(  # Numba passes arguments by position
    _: object,
    num_rows: types.Type,
    num_columns: types.Type,
    x_at: types.Type,
    x_stride: types.Type,
    w_at: types.Type,
    depth: types.Type,
    out_at: types.Type,
    out_stride: types.Type,
    adds: types.Type,
) -> tuple[Any, Any]:
    signature: Any = cast("Any", types.void)(
        num_rows, num_columns, x_at, x_stride, w_at, depth, out_at, out_stride, adds
    )

    def lower(context: Any, builder: Any, _: Any, args: tuple[ir.Value, ...]) -> Any:
        if HAS_MATRIX_REGISTERS:
            rows, columns, x_at, x_stride, w_at, depth, out_at, out_stride, adds = args
            one = ir.Constant(I64, 1)
            values = ProductValues(
                x_at, x_stride, _ZERO, one, w_at, depth, out_at, out_stride, adds
            )
            is_narrow = builder.icmp_signed("<=", columns, ir.Constant(I64, REGISTER_COLUMNS))
            with builder.if_else(is_narrow) as (narrow, wide):
                with narrow:
                    emit_product(builder, rows, 1, values)
                with wide:
                    emit_product(builder, rows, 2, values)
        return context.get_dummy_value()

    return signature, lower


def _intrinsic_answer(holds: Callable[[Any], bool]) -> Any:
    def typing(_: object, cell: types.Type) -> tuple[Any, Any]:
        answer = HAS_MATRIX_REGISTERS and holds(cell)

        def lower(context: Any, *_: Any) -> Any:
            return context.get_constant(types.boolean, answer)

        return cast("Any", types.boolean)(cell), lower

    return intrinsic(typing)


is_for_matrix_registers = cast("Callable[[Cell], bool]", _intrinsic_answer(is_pair))
"""Whether weights of this cell are multiplied here; known when a caller is compiled."""

is_widened_first = cast(
    "Callable[[Cell], bool]", _intrinsic_answer(lambda cell: cell == types.int8)
)
"""Whether weights of this cell are multiplied here after they were widened, if x comes in parts."""

attends_in_matrix_registers = cast(
    "Callable[[Cell], bool]", _intrinsic_answer(lambda cell: cell == types.uint16)
)
"""Whether pages of this cell are; known when a caller is compiled."""

take_matrix_registers = cast("Callable[[int], None]", intrinsic(_take))
"""Shape this thread's registers for products of so many rows, or of REGISTER_ROWS and more."""

give_back_matrix_registers = cast("Callable[[], None]", intrinsic(_give_back))
"""Leave them empty, so that the system need not keep them for this thread."""

matrix_product = cast(
    "Callable[[int, int, int, int, int, int, int, int, bool], None]", intrinsic(_matrix_product)
)
"""(num_rows, num_columns, x address, x stride, w address, depth, out address, out stride, adds).

out[m, n] = (out[m, n] if it adds) + sum over k < depth of
x[m, 2k] w[k, n][0] + x[m, 2k + 1] w[k, n][1], for n < num_columns, one register's or two
registers', and m < num_rows, what the registers were taken for or
REGISTER_ROWS .. MAX_MATRIX_ROWS. Rows of w are dense. Addresses in bytes; strides of rows and the
depth, a multiple of MATRIX_DEPTH / 2, in elements of 4 bytes: pairs of x and w, float32 of out.
Numbers too small for a normal float32 count as zero.
"""
