"""y = x W^T + b, as torch has it."""

from torch import Tensor
from torch.nn import functional

from pageray.kernels.ops import Linear


def pack_linear(weight_OE: Tensor, bias_O: Tensor | None) -> Linear:
    """Nothing to pack: the result multiplies by the weight as it stands."""

    def linear(x_TE: Tensor) -> Tensor:
        return functional.linear(x_TE, weight_OE, bias_O)

    return linear
