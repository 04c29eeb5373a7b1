"""y = silu(gate) * up, silu(x) = x / (1 + exp(-x)): the SwiGLU gate (arXiv:2002.05202)."""

from torch import Tensor
from torch.nn import functional

from pageray.kernels.reference.precision import widened


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """A new [T, I] tensor of the input's dtype; gate is the first half of a row."""
    gate, up = widened(gate_up_T2I).chunk(2, dim=-1)
    return (functional.silu(gate) * up).to(gate_up_T2I.dtype)
