"""y = x W^T + b: our own panels, or oneDNN where the machine multiplies 16-bit numbers itself.

With few rows a product is as fast as weights can be read, which the panels do at memory speed.
With many rows arithmetic decides, and instructions for bfloat16 or float16 do twice as much of it
as float32 ones. On such a machine the weight is kept in both forms; elsewhere the panels win at
every number of rows and are all there is.
"""

from typing import cast

import torch
from torch import Tensor

from pageray.kernels.cpu.matmul import multiply, panels_of
from pageray.kernels.cpu.packed_weight import (
    PackedWeight,
    check_bias,
    pack_weight,
    pack_weight_int8,
)
from pageray.kernels.ops import Linear

MAX_PANEL_ROWS = 8
"""Up to so many rows the panels are taken even where oneDNN has 16-bit instructions to use."""
_ONEDNN_ROWS = 32
"""oneDNN packs for a number of rows; this one serves all of them as well as their own would."""


def pack_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Raises ValueError if weight and bias do not fit. Only packed forms are kept."""
    check_bias(weight_OE, bias_O)
    few_rows = PanelLinear(pack_weight(weight_OE, bias_O))
    if not multiplies_natively(weight_OE.dtype):
        return few_rows
    return _by_number_of_rows(few_rows, pack_onednn_linear(weight_OE, bias_O))


def pack_linear_int8(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Like `pack_linear`, with weights of 8 bits and a scale per output."""
    return PanelLinear(pack_weight_int8(weight_OE, bias_O))


def multiplies_natively(dtype: torch.dtype) -> bool:
    """Does this CPU have instructions for products of this 16-bit dtype, and oneDNN use them?"""
    if not torch.backends.mkldnn.is_available():
        return False
    match dtype:
        case torch.bfloat16:
            return cast("bool", torch.ops.mkldnn._is_mkldnn_bf16_supported())
        case torch.float16:
            return cast("bool", torch.ops.mkldnn._is_mkldnn_fp16_supported())
        case _:
            return False


class PanelLinear:
    """A product with a packed weight, on our own kernel."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self._panels = panels_of(weight)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return multiply(x_TE, self._weight, self._panels)


def pack_onednn_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """A product by oneDNN alone."""
    in_features = weight_OE.shape[1]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_OE.contiguous(), _ONEDNN_ROWS)
    multiply_packed = torch.ops.mkldnn._linear_pointwise.default

    def linear(x_TE: Tensor) -> Tensor:
        # oneDNN reads past the end of a row that is too short.
        if x_TE.shape[-1] != in_features:
            raise ValueError(f"x has shape {tuple(x_TE.shape)}; its last dim must be {in_features}")
        return multiply_packed(x_TE, packed, bias_O, "none", [], "")

    return linear


def _by_number_of_rows(few: Linear, many: Linear) -> Linear:
    def linear(x_TE: Tensor) -> Tensor:
        return few(x_TE) if x_TE.shape[0] <= MAX_PANEL_ROWS else many(x_TE)

    return linear
