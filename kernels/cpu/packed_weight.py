"""Weights in the order in which `tile_product` reads them: panels of PANEL output columns.

A float32 matrix whose every element is also a bfloat16 number is kept as bfloat16: nothing is
lost, and a decode step, which does little but read weights, reads half as much. That is how most
models are published.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageray.kernels.cpu.tile_product import PANEL


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedWeight:
    """A matrix [O, E] and its bias."""

    panels_PEN: Tensor
    """[ceil(O / PANEL), E, PANEL], any storage; columns past O are zero."""
    scale_O: Tensor
    """float32 [O], padded: what a column's sum is multiplied with."""
    bias_O: Tensor
    """float32 [O], padded."""
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        return self.panels_PEN.shape[1]


Pack = Callable[[Tensor, Tensor | None], PackedWeight]
"""(weight_OE, bias_O or None) -> the two in the order and storage of `tile_product`."""


def pack_weight(weight_OE: Tensor, bias_O: Tensor | None) -> PackedWeight:
    """Raises ValueError if weight and bias do not fit."""
    check_bias(weight_OE, bias_O)
    stored_OE = _without_loss(weight_OE)
    return _packed(stored_OE, torch.ones(weight_OE.shape[0]), bias_O)


def pack_weight_int8(weight_OE: Tensor, bias_O: Tensor | None) -> PackedWeight:
    """Each output's weights rounded to -127 .. 127 times a scale of its own."""
    check_bias(weight_OE, bias_O)
    weight_OE = weight_OE.float()
    largest_O = weight_OE.abs().amax(dim=1)
    scale_O = torch.where(largest_O > 0, largest_O / 127, torch.ones_like(largest_O))
    return _packed((weight_OE / scale_O.unsqueeze(1)).round().to(torch.int8), scale_O, bias_O)


def check_bias(weight_OE: Tensor, bias_O: Tensor | None) -> None:
    """Raises ValueError unless there is one bias per output, or none."""
    if bias_O is not None and bias_O.shape != weight_OE.shape[:1]:
        raise ValueError(
            f"bias has shape {tuple(bias_O.shape)}; "
            f"a weight of {tuple(weight_OE.shape)} needs ({weight_OE.shape[0]},)"
        )


def _without_loss(weight_OE: Tensor) -> Tensor:
    if weight_OE.dtype is torch.float32:
        narrow_OE = weight_OE.to(torch.bfloat16)
        if torch.equal(narrow_OE.float(), weight_OE):
            return narrow_OE
    return weight_OE


def _packed(stored_OE: Tensor, scale_O: Tensor, bias_O: Tensor | None) -> PackedWeight:
    num_outputs, num_inputs = stored_OE.shape
    num_panels = -(-num_outputs // PANEL)
    missing = num_panels * PANEL - num_outputs
    panels_PNE = functional.pad(stored_OE, (0, 0, 0, missing)).view(num_panels, PANEL, num_inputs)
    bias_O = torch.zeros(num_outputs) if bias_O is None else bias_O.float()
    return PackedWeight(
        panels_PEN=panels_PNE.transpose(1, 2).contiguous(),
        scale_O=functional.pad(scale_O.float(), (0, missing)),
        bias_O=functional.pad(bias_O, (0, missing)),
        num_outputs=num_outputs,
    )
