"""Vector registers in LLVM's terms: how many lanes, and 16-bit storage widened lane by lane.

Loops that LLVM cannot be trusted to vectorise well are written with these, as intrinsics. The
code is the same for every machine; only the width differs.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

from llvmlite import binding, ir
from numba import types

HOST_FEATURES = cast("dict[str, bool]", binding.get_host_cpu_features())
"""What this processor can do, under LLVM's names."""


def _shape_of_machine() -> tuple[int, int]:
    """(float32 lanes of a register, number of registers)."""
    if HOST_FEATURES.get("avx512f"):
        return 16, 32
    if HOST_FEATURES.get("avx2"):
        return 8, 16
    return 4, 32 if HOST_FEATURES.get("neon") else 16


LANES, NUM_REGISTERS = _shape_of_machine()

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
_HALF, _I16 = ir.HalfType(), ir.IntType(16)

HAS_PAIR_PRODUCTS = LANES == 16 and bool(HOST_FEATURES.get("avx512bf16"))
"""Whether one instruction multiplies pairs of bfloat16 in every lane and adds them up."""


class _BFloat16(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat16)

    def __hash__(self) -> int:
        return hash(_BFloat16)


_PAIRS = ir.VectorType(_BFloat16(), 2 * LANES)


def zeros() -> ir.Constant:
    """A vector of zeros."""
    return ir.Constant(VECTOR, [0.0] * LANES)


def storage_type(cell: Any) -> ir.Type:
    """What LLVM calls an element of an array of this Numba type."""
    if cell == types.float32:
        return F32
    if is_pair(cell):
        return I32
    if cell in (types.uint16, types.int16):
        return ir.IntType(16)
    if cell == types.int8:
        return ir.IntType(8)
    raise TypeError(
        "Vectors are loaded from float32, uint16 (bfloat16), int32 (two of them), int16 (float16) "
        f"or int8, not {cell}"
    )


def is_pair(cell: Any) -> bool:
    """Whether an element is two bfloat16, the first in its lower half."""
    return cell == types.int32


def load_vector(builder: Any, cell: Any, at: ir.Value) -> ir.Value:
    """The float32 values of the LANES elements from `at` on, or the pairs as they are; no
    alignment is asked for."""
    storage = storage_type(cell)
    raw_type = ir.VectorType(storage, LANES)
    raw = builder.load(builder.bitcast(at, raw_type.as_pointer()), align=storage_bytes(cell))
    integers = ir.VectorType(I32, LANES)
    if cell == types.float32 or is_pair(cell):
        return raw
    if cell == types.uint16:
        shift = ir.Constant(integers, [16] * LANES)
        return builder.bitcast(builder.shl(builder.zext(raw, integers), shift), VECTOR)
    if cell == types.int16:
        return builder.fpext(builder.bitcast(raw, ir.VectorType(_HALF, LANES)), VECTOR)
    return builder.sitofp(builder.sext(raw, integers), VECTOR)


def load_float_vector(builder: Any, at: ir.Value) -> ir.Value:
    """The LANES float32 from `at` on; no alignment is asked for."""
    return builder.load(builder.bitcast(at, VECTOR.as_pointer()), align=4)


def store_float_vector(builder: Any, vector: ir.Value, at: ir.Value) -> None:
    """The inverse of `load_float_vector`."""
    builder.store(vector, builder.bitcast(at, VECTOR.as_pointer()), align=4)


def broadcast(builder: Any, scalar: Any) -> ir.Value:
    """A vector with the float32, or the pair, in every lane."""
    undefined = ir.Constant(ir.VectorType(scalar.type, LANES), None)
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def multiply_add(builder: Any, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c in every lane, rounded once."""
    return builder.call(declared(builder, f"llvm.fma.v{LANES}f32", VECTOR, [VECTOR] * 3), (a, b, c))


def multiply_add_pairs(builder: Any, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a[0] * b[0] + a[1] * b[1] + c in every lane, for pairs a and b. Numbers too small for a
    normal float32 count as zero. Raises RuntimeError on a processor that cannot."""
    if not HAS_PAIR_PRODUCTS:
        raise RuntimeError("this processor has no products of bfloat16 pairs")
    function = declared(
        builder, "llvm.x86.avx512bf16.dpbf16ps.512", VECTOR, [VECTOR, _PAIRS, _PAIRS]
    )
    return builder.call(function, (c, builder.bitcast(a, _PAIRS), builder.bitcast(b, _PAIRS)))


def prefetch(builder: Any, at: ir.Value, distance: int) -> None:
    """Ask for the line `distance` bytes past a pointer, to be read soon."""
    byte = ir.IntType(8).as_pointer()
    function = declared(builder, "llvm.prefetch.p0", ir.VoidType(), [byte, I32, I32, I32])
    address = builder.gep(builder.bitcast(at, byte), [ir.Constant(I64, distance)])
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    builder.call(function, (address, read, keep, data))


def loop(
    builder: Any,
    start: ir.Value,
    stop: ir.Value,
    step: int,
    carried: Sequence[Any],
    body: Callable[[ir.Value, list[ir.Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """A loop over index = start, start + step, ... < stop, all int64.

    `body` emits an iteration for an index and what the one before carried on, and returns what it
    carries on itself. Returns what the last one did, or `carried` if there was none.
    """
    before = builder.block
    head = builder.append_basic_block("loop.head")
    inside = builder.append_basic_block("loop.body")
    after = builder.append_basic_block("loop.end")
    builder.branch(head)
    builder.position_at_end(head)
    index = builder.phi(I64)
    index.add_incoming(start, before)
    values = [builder.phi(value.type) for value in carried]
    for phi, value in zip(values, carried, strict=True):
        phi.add_incoming(value, before)
    builder.cbranch(builder.icmp_signed("<", index, stop), inside, after)
    builder.position_at_end(inside)
    for phi, value in zip(values, body(index, list(values)), strict=True):
        phi.add_incoming(value, builder.block)
    index.add_incoming(builder.add(index, ir.Constant(I64, step)), builder.block)
    builder.branch(head)
    builder.position_at_end(after)
    return values


def narrow_vector(builder: Any, cell: Any, vector: ir.Value) -> ir.Value:
    """LANES float32 as an array of this Numba type stores them, rounded to nearest even."""
    if cell == types.float32:
        return vector
    if cell == types.int16:
        return builder.bitcast(
            builder.fptrunc(vector, ir.VectorType(_HALF, LANES)), ir.VectorType(_I16, LANES)
        )
    if HAS_PAIR_PRODUCTS:
        narrow = declared(
            builder,
            "llvm.x86.avx512bf16.cvtneps2bf16.512",
            ir.VectorType(_BFloat16(), LANES),
            [VECTOR],
        )
        return builder.bitcast(builder.call(narrow, [vector]), ir.VectorType(_I16, LANES))
    integers = ir.VectorType(I32, LANES)

    def each(value: int) -> ir.Constant:
        return ir.Constant(integers, [value] * LANES)

    # As `numerics.narrow` does it.
    bits = builder.bitcast(vector, integers)
    high = builder.lshr(bits, each(16))
    half = builder.add(builder.and_(high, each(1)), each(0x7FFF))
    rounded = builder.lshr(builder.add(bits, half), each(16))
    is_nan = builder.fcmp_unordered("uno", vector, vector)
    stored = builder.select(is_nan, builder.or_(high, each(0x40)), rounded)
    return builder.trunc(stored, ir.VectorType(_I16, LANES))


def narrow_in_order(builder: Any, first: ir.Value, second: ir.Value) -> ir.Value:
    """2 LANES of bfloat16, those of `first` and then those of `second`, as 16-bit integers."""
    halves = ir.VectorType(_I16, 2 * LANES)
    if HAS_PAIR_PRODUCTS:
        narrow = declared(
            builder, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _PAIRS, [VECTOR, VECTOR]
        )
        return builder.bitcast(builder.call(narrow, [second, first]), halves)
    low, high = (narrow_vector(builder, types.uint16, vector) for vector in (first, second))
    mask = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    return builder.shuffle_vector(low, high, mask)


def narrow_to_pairs(builder: Any, first: ir.Value, second: ir.Value) -> ir.Value:
    """LANES pairs of bfloat16, each a number of `first` in its lower half and one of `second`."""
    integers = ir.VectorType(I32, LANES)
    if HAS_PAIR_PRODUCTS:
        halves = narrow_in_order(builder, first, second)
        lanes = [index // 2 + (index % 2) * LANES for index in range(2 * LANES)]
        mask = ir.Constant(ir.VectorType(I32, 2 * LANES), lanes)
        return builder.bitcast(builder.shuffle_vector(halves, halves, mask), integers)
    low, high = (
        builder.zext(narrow_vector(builder, types.uint16, vector), integers)
        for vector in (first, second)
    )
    return builder.or_(low, builder.shl(high, ir.Constant(integers, [16] * LANES)))


def store_vector(builder: Any, cell: Any, vector: ir.Value, at: ir.Value) -> None:
    """Store LANES float32 as `narrow_vector` has them; no alignment is asked for."""
    stored: Any = narrow_vector(builder, cell, vector)
    at = builder.bitcast(at, stored.type.as_pointer())
    builder.store(stored, at, align=storage_bytes(cell))


def declared(builder: Any, name: str, result: ir.Type, args: list[ir.Type]) -> Any:
    """LLVM's function of this name."""
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(result, args), name)
    return function


def storage_bytes(cell: Any) -> int:
    """Bytes of an element of an array of this Numba type."""
    return cast("int", cell.bitwidth) // 8


def code_for_each_count(
    max_rows: int, emit: Callable[[Any, Any, int, tuple[ir.Value, ...]], None]
) -> Callable[..., tuple[Any, Any]]:
    """What an intrinsic returns for its arguments' types: code for 1 .. max_rows rows, and a switch.

    The intrinsic's first argument is the number of rows and its fourth a pointer. `emit` gets the
    builder, the pointer's cell, a number of rows, and the values of all arguments but the first,
    the pointer's address in its place.
    """

    def typed(*types_of_args: Any) -> tuple[Any, Any]:
        def lower(context: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
            num_rows, first, stride, at, *rest = args
            cell = signature.args[3].types[1]
            values = (first, stride, builder.extract_value(at, 0), *rest)
            after = builder.append_basic_block("rows.end")
            switch = builder.switch(num_rows, after)
            for count in range(1, max_rows + 1):
                block = builder.append_basic_block(f"rows.{count}")
                switch.add_case(ir.Constant(I64, count), block)
                builder.position_at_end(block)
                emit(builder, cell, count, values)
                builder.branch(after)
            builder.position_at_end(after)
            return context.get_dummy_value()

        return cast("Any", types.void)(*types_of_args), lower

    return typed
