"""Vector registers in LLVM's terms: how many lanes, and 16-bit storage widened lane by lane.

Loops that LLVM cannot be trusted to vectorise well are written with these, as intrinsics. The
code is the same for every machine; only the width differs.
"""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import binding, ir
from numba import types

_FEATURES = cast("dict[str, bool]", binding.get_host_cpu_features())


def _shape_of_machine() -> tuple[int, int]:
    """(float32 lanes of a register, number of registers)."""
    if _FEATURES.get("avx512f"):
        return 16, 32
    if _FEATURES.get("avx2"):
        return 8, 16
    return 4, 32 if _FEATURES.get("neon") else 16


LANES, NUM_REGISTERS = _shape_of_machine()

F32 = ir.FloatType()
I32 = ir.IntType(32)
I64 = ir.IntType(64)
VECTOR = ir.VectorType(F32, LANES)
_HALF = ir.HalfType()


def zeros() -> ir.Constant:
    """A vector of zeros."""
    return ir.Constant(VECTOR, [0.0] * LANES)


def storage_type(cell: Any) -> ir.Type:
    """What LLVM calls an element of an array of this Numba type."""
    if cell == types.float32:
        return F32
    if cell in (types.uint16, types.int16):
        return ir.IntType(16)
    if cell == types.int8:
        return ir.IntType(8)
    raise TypeError(
        f"Vectors are loaded from float32, uint16 (bfloat16), int16 (float16) or int8, not {cell}"
    )


def load_vector(builder: Any, cell: Any, at: ir.Value) -> ir.Value:
    """The float32 values of the LANES elements from `at` on; no alignment is asked for."""
    storage = storage_type(cell)
    raw_type = ir.VectorType(storage, LANES)
    raw = builder.load(builder.bitcast(at, raw_type.as_pointer()), align=storage_bytes(cell))
    integers = ir.VectorType(I32, LANES)
    if cell == types.float32:
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


def broadcast(builder: Any, scalar: ir.Value) -> ir.Value:
    """A vector with the float32 in every lane."""
    undefined = zeros()
    first = builder.insert_element(undefined, scalar, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, lanes)


def multiply_add(builder: Any, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c in every lane, rounded once."""
    name = f"llvm.fma.v{LANES}f32"
    function = builder.module.globals.get(name)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(VECTOR, [VECTOR] * 3), name)
    return builder.call(function, (a, b, c))


def prefetch(builder: Any, at: ir.Value, distance: int) -> None:
    """Ask for the line `distance` bytes past a pointer, to be read soon."""
    byte = ir.IntType(8).as_pointer()
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name)
    if function is None:
        signature = ir.FunctionType(ir.VoidType(), [byte, I32, I32, I32])
        function = ir.Function(builder.module, signature, name)
    address = builder.gep(builder.bitcast(at, byte), [ir.Constant(I64, distance)])
    read, keep, data = (ir.Constant(I32, value) for value in (0, 3, 1))
    builder.call(function, (address, read, keep, data))


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
