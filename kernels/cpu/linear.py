"""y = x W^T + b on packed weights."""

from torch import Tensor

from pageray.kernels.cpu.matmul import multiply
from pageray.kernels.cpu.packed_weight import PackedWeight, pack_weight, pack_weight_int8
from pageray.kernels.cpu.panels import panels_of
from pageray.kernels.ops import Linear


def pack_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Raises ValueError if weight and bias do not fit. Only the packed form is kept."""
    return PanelLinear(pack_weight(weight_OE, bias_O))


def pack_linear_int8(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Like `pack_linear`, with weights of 8 bits and a scale per output."""
    return PanelLinear(pack_weight_int8(weight_OE, bias_O))


class PanelLinear:
    """A product with a packed weight."""

    def __init__(self, weight: PackedWeight) -> None:
        self._weight = weight
        self._panels = panels_of(weight)

    def __call__(self, x_TE: Tensor) -> Tensor:
        return multiply(x_TE, self._weight, self._panels)
