"""y = (silu(x G^T) * (x U^T)) D^T, one operation after the other."""

from torch import Tensor

from pageray.kernels.ops import Linear
from pageray.kernels.reference.linear import pack_linear
from pageray.kernels.reference.silu_mul import silu_mul


def pack_mlp(
    gate_up_2IE: Tensor, gate_up_bias: Tensor | None, down_EI: Tensor, down_bias: Tensor | None
) -> Linear:
    """Raises ValueError if shapes do not fit."""
    gate_up, down = pack_linear(gate_up_2IE, gate_up_bias), pack_linear(down_EI, down_bias)

    def mlp(x_TE: Tensor) -> Tensor:
        return down(silu_mul(gate_up(x_TE)))

    return mlp
