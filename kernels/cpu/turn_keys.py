"""k_DJ = the keys of a page turned round, widened to float32, as `tile_product` takes them."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import FLOAT_CELL, Pointer, flat
from pageray.kernels.cpu.numerics import widen
from pageray.kernels.cpu.vectors import (
    F32,
    I32,
    I64,
    LANES,
    load_vector,
    storage_type,
    store_float_vector,
)


def _turn_square(  # Numba passes arguments by position
    _: object,
    k_at: types.Type,
    k_offset: types.Type,
    k_stride: types.Type,
    out_at: types.Type,
    out_stride: types.Type,
) -> tuple[Any, Any]:
    signature: Any = types.void(k_at, k_offset, k_stride, out_at, out_stride)

    def lower(_: Any, builder: Any, signature: Any, args: tuple[ir.Value, ...]) -> Any:
        k_pointer, k_offset, k_stride, out_at, out_stride = args
        cell = signature.args[0].types[1]
        address = builder.extract_value(k_pointer, 0)
        k = builder.gep(builder.inttoptr(address, storage_type(cell).as_pointer()), [k_offset])
        out = builder.inttoptr(out_at, F32.as_pointer())

        def row(base: ir.Value, stride: ir.Value, index: int) -> ir.Value:
            return builder.gep(base, [builder.mul(stride, ir.Constant(I64, index))])

        vectors = [load_vector(builder, cell, row(k, k_stride, j)) for j in range(LANES)]
        for d, vector in enumerate(turned(builder, vectors)):
            store_float_vector(builder, vector, row(out, out_stride, d))
        return _.get_dummy_value()

    return signature, lower


def turned(builder: Any, vectors: list[ir.Value]) -> list[ir.Value]:
    """LANES vectors as columns instead of rows.

    Blocks of half, a quarter, ... of the lanes are swapped between rows that are as far apart
    (Eklundh 1972, doi:10.1109/T-C.1972.223584). Large blocks first: where only the first rows are
    used, LLVM leaves most of the swaps out.
    """
    distance = LANES // 2
    while distance > 0:
        swapped = list(vectors)
        for i in range(LANES):
            if i & distance:
                continue
            a, b = vectors[i], vectors[i + distance]
            low = [x if not x & distance else LANES + x - distance for x in range(LANES)]
            high = [x + distance if not x & distance else LANES + x for x in range(LANES)]
            for target, lanes in ((i, low), (i + distance, high)):
                mask = ir.Constant(ir.VectorType(I32, LANES), lanes)
                swapped[target] = builder.shuffle_vector(a, b, mask)
        vectors = swapped
        distance //= 2
    return vectors


turn_square = cast("Callable[[Pointer, int, int, int, int], None]", intrinsic(_turn_square))
"""(x pointer, offset, x stride, out address, out stride): out[j, i] = x[i, j] for i, j < LANES, as
float32; offset and strides in elements."""


@jit
def turn_keys(
    kv_at: Pointer, first: int, num_keys: int, head_dim: int, out_at: int, out_stride: int
) -> None:
    """out[d, j] = element d of the j-th key from element `first` on, for j < num_keys.

    out_at is an address, out_stride the distance of its float32 rows in elements.
    """
    whole_keys = num_keys // LANES * LANES
    whole_dims = head_dim // LANES * LANES
    for j in range(0, whole_keys, LANES):
        for d in range(0, whole_dims, LANES):
            at = out_at + 4 * (d * out_stride + j)
            turn_square(kv_at, first + j * head_dim + d, head_dim, at, out_stride)
    for j in range(num_keys):
        key = flat(kv_at, first + j * head_dim)
        for d in range(whole_dims if j < whole_keys else 0, head_dim):
            flat((out_at, FLOAT_CELL), d * out_stride + j)[0] = widen(key[d])
