"""y = x W^T + b. A plain matrix product is cuBLAS's work, reached through torch.

Shapes: x_TE tokens by hidden size, weight_OE outputs by hidden size, y_TO.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from pageray.kernels.gpu.checks import check_dtype, check_ndim, check_shape
from pageray.kernels.ops import Linear


@dataclass(frozen=True, eq=False)
class _Linear:
    """The weight as it came: cuBLAS reads row-major [O, E] without a copy."""

    weight_OE: Tensor
    bias_O: Tensor | None

    def __call__(self, x_TE: Tensor) -> Tensor:
        return functional.linear(x_TE, self.weight_OE, self.bias_O)


def pack_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Take the weight over; the result maps x_TE to a new y_TO of x's dtype."""
    check_dtype("weight_OE", weight_OE)
    check_ndim("weight_OE", weight_OE, 2)
    if bias_O is not None:
        check_shape("bias_O", bias_O, (weight_OE.shape[0],))
    return _Linear(weight_OE, bias_O)
