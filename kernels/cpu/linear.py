"""y = x W^T + b with the weight reordered once into oneDNN's blocked layout.

That pays most for the few rows of a decode step. One packing, made for 32 rows, is as good as one
made for each row count, so only one is kept.
"""

from typing import cast

import torch
from torch import Tensor
from torch.nn import functional

from pageray.kernels.ops import Linear

_PACKED_FOR_ROWS = 32


def pack_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Raises ValueError if weight and bias do not fit. Only the packed form is kept."""
    if bias_O is not None and bias_O.shape != weight_OE.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias_O.shape)}; "
            f"a weight of {tuple(weight_OE.shape)} needs ({weight_OE.shape[0]},)"
        )
    if not _can_pack(weight_OE.dtype):
        return _plain_linear(weight_OE, bias_O)
    return _packed_linear(weight_OE, bias_O)


def _can_pack(dtype: torch.dtype) -> bool:
    """Does this build of torch have oneDNN, and oneDNN this dtype on this CPU?"""
    if not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.float32:
            return True
        case torch.bfloat16:
            return cast("bool", torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return cast("bool", torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


def _plain_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    def linear(x_TE: Tensor) -> Tensor:
        return functional.linear(x_TE, weight_OE, bias_O)

    return linear


def _packed_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    in_features = weight_OE.shape[1]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OE.contiguous(), _PACKED_FOR_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def linear(x_TE: Tensor) -> Tensor:
        # oneDNN reads past the end of a row that is too short.
        if x_TE.shape[-1] != in_features:
            raise ValueError(f"x has shape {tuple(x_TE.shape)}; its last dim must be {in_features}")
        return multiply(x_TE, packed, bias_O, "none", [], "")

    return linear
