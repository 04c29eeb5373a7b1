"""Weights in the order in which products read them: panels of PANEL output columns.

A float32 matrix whose every element is also a bfloat16 number is kept as bfloat16: nothing is
lost, and a decode step, which does little but read weights, reads half as much. That is how most
models are published.

Where the processor multiplies bfloat16 itself, a panel holds pairs of inputs side by side, and x is
bfloat16 too. An x of float32 is cut into three bfloat16 numbers that add up to it, 8 bits of it
each, and the three products are summed in float32 (Henry, Tang and Heinecke 2019,
arXiv:1904.06376): on matrix registers that is still faster than float32 arithmetic.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageray.kernels.cpu.matrix_tile import HAS_MATRIX_REGISTERS, MATRIX_DEPTH
from pageray.kernels.cpu.tile_product import PANEL
from pageray.kernels.cpu.vectors import HAS_PAIR_PRODUCTS

_PARTS_OF_FLOAT32 = 3


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """A matrix [O, E] and its bias."""

    panels_PKN: Tensor
    """[ceil(O / PANEL), E, PANEL] in any storage; or, where x is cut into parts, of two inputs side
    by side: [.., E / 2, PANEL] of int32, two bfloat16 each, or [.., E / 2, PANEL, 2] of int8.
    Columns past O are zero."""
    scale_O: Tensor
    """float32 [O], padded: what a column's sum is multiplied with."""
    bias_O: Tensor
    """float32 [O], padded."""
    num_inputs: int
    num_outputs: int
    num_parts: int
    """bfloat16 numbers that an element of x is cut into; 0 if x is multiplied as float32."""

    @property
    def depth(self) -> int:
        """Rows of a panel."""
        return self.panels_PKN.shape[1]

    @property
    def bytes_per_row(self) -> int:
        """Of a panel."""
        return self.panels_PKN[:1, :1].numel() * self.panels_PKN.element_size()

    @property
    def operand_bytes(self) -> int:
        """Of a row of x, as it is written and, where it is cut into parts, as it is multiplied."""
        parts = self.num_parts * torch.bfloat16.itemsize if self.num_parts > 1 else 0
        return self.num_inputs * (self.x_dtype.itemsize + parts)

    @property
    def x_dtype(self) -> torch.dtype:
        """What x is before it is cut into parts."""
        return torch.bfloat16 if self.num_parts == 1 else torch.float32


Pack = Callable[[Tensor, Tensor | None], PackedWeight]
"""(weight_OE, bias_O or None) -> the two in the order and storage of the products."""


def pack_weight(weight_OE: Tensor, bias_O: Tensor | None) -> PackedWeight:
    """Raises ValueError if weight and bias do not fit."""
    check_bias(weight_OE, bias_O)
    stored_OE = _without_loss(weight_OE)
    num_parts = _parts_of_x(stored_OE, weight_OE.dtype)
    return _packed(stored_OE, torch.ones(weight_OE.shape[0]), bias_O, num_parts)


def pack_weight_int8(weight_OE: Tensor, bias_O: Tensor | None) -> PackedWeight:
    """Each output's weights rounded to -127 .. 127 times a scale of its own."""
    check_bias(weight_OE, bias_O)
    dtype, weight_OE = weight_OE.dtype, weight_OE.float()
    largest_O = weight_OE.abs().amax(dim=1)
    scale_O = torch.where(largest_O > 0, largest_O / 127, torch.ones_like(largest_O))
    int8_OE = (weight_OE / scale_O.unsqueeze(1)).round().to(torch.int8)
    return _packed(int8_OE, scale_O, bias_O, _parts_of_x(int8_OE, dtype))


def check_bias(weight_OE: Tensor, bias_O: Tensor | None) -> None:
    """Raises ValueError unless there is one bias per output, or none."""
    if bias_O is not None and bias_O.shape != weight_OE.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias_O.shape)}; "
            f"a weight of {tuple(weight_OE.shape)} needs ({weight_OE.shape[0]},)"
        )


def multiplies_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 with instructions that are used here."""
    return HAS_PAIR_PRODUCTS or HAS_MATRIX_REGISTERS


def _without_loss(weight_OE: Tensor) -> Tensor:
    if weight_OE.dtype is torch.float32:
        narrow_OE = weight_OE.to(torch.bfloat16)
        if torch.equal(narrow_OE.float(), weight_OE):
            return narrow_OE
    return weight_OE


def _parts_of_x(stored_OE: Tensor, dtype: torch.dtype) -> int:
    """`PackedWeight.num_parts` for a weight of `dtype` and how it is stored."""
    if stored_OE.dtype not in (torch.bfloat16, torch.int8) or stored_OE.shape[1] % MATRIX_DEPTH:
        return 0
    if HAS_MATRIX_REGISTERS:
        return 1 if dtype is torch.bfloat16 else _PARTS_OF_FLOAT32
    # In vector registers a product of pairs saves half of the work, which three of them lose again,
    # and so does making bfloat16 of int8.
    in_pairs = multiplies_bfloat16() and stored_OE.dtype is dtype is torch.bfloat16
    return 1 if in_pairs else 0


def _packed(
    stored_OE: Tensor, scale_O: Tensor, bias_O: Tensor | None, num_parts: int
) -> PackedWeight:
    num_outputs, num_inputs = stored_OE.shape
    missing = -num_outputs % PANEL
    if num_parts:
        # Two inputs move as one number.
        one = torch.int16 if stored_OE.dtype is torch.int8 else torch.int32
        stored_OE = stored_OE.contiguous().view(one)
    padded_OK = functional.pad(stored_OE, (0, 0, 0, missing))
    panels_PNK = padded_OK.view(-1, PANEL, stored_OE.shape[1])
    panels_PKN = panels_PNK.transpose(1, 2).contiguous()
    if panels_PKN.dtype is torch.int16:
        panels_PKN = panels_PKN.view(torch.int8).view(*panels_PKN.shape, 2)
    bias_O = torch.zeros(num_outputs) if bias_O is None else bias_O.float()
    return PackedWeight(
        panels_PKN=panels_PKN,
        scale_O=functional.pad(scale_O.float(), (0, missing)),
        bias_O=functional.pad(bias_O, (0, missing)),
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        num_parts=num_parts,
    )
