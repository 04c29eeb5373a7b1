"""y = silu(gate) * up, silu(x) = x / (1 + exp(-x)): the SwiGLU gate (arXiv:2002.05202).

Shapes: gate_up_T2I (gate is the first half of a row), y_TI.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import check_dtype, check_last_dim_contiguous, check_ndim
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.gpu.precision import round_to

_BLOCK_I = 1024


# Grid: (T, cdiv(I, BLOCK_I)).
@triton.jit
def silu_mul_kernel(
    gate_up_ptr, y_ptr, stride_T, INTERMEDIATE: tl.constexpr, BLOCK_I: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    i_I = tl.program_id(1) * BLOCK_I + tl.arange(0, BLOCK_I)
    mask_I = i_I < INTERMEDIATE
    gate_ptr = gate_up_ptr + token * stride_T + i_I
    gate_I = tl.load(gate_ptr, mask=mask_I, other=0.0).to(tl.float32)
    up_I = tl.load(gate_ptr + INTERMEDIATE, mask=mask_I, other=0.0).to(tl.float32)
    y_I = gate_I * tl.sigmoid(gate_I) * up_I
    y_ptrs = y_ptr + token * INTERMEDIATE + i_I
    tl.store(y_ptrs, round_to(y_I, y_ptr.dtype.element_ty), mask=mask_I)


def silu_mul_launch(gate_up_T2I: Tensor, y_TI: Tensor) -> Launch:
    """y = silu(gate) * up, with y contiguous."""
    num_tokens, intermediate = y_TI.shape
    return Launch(
        kernel=silu_mul_kernel,
        grid=(num_tokens, triton.cdiv(intermediate, _BLOCK_I)),
        args={"gate_up_ptr": gate_up_T2I, "y_ptr": y_TI, "stride_T": gate_up_T2I.stride(0)},
        constants={"INTERMEDIATE": intermediate, "BLOCK_I": _BLOCK_I},
    )


def silu_mul(gate_up_T2I: Tensor) -> Tensor:
    """A new [T, I] tensor of the input's dtype. Rows may be strided, their elements not."""
    check_dtype("gate_up_T2I", gate_up_T2I)
    check_ndim("gate_up_T2I", gate_up_T2I, 2)
    check_last_dim_contiguous("gate_up_T2I", gate_up_T2I)
    num_tokens, width = gate_up_T2I.shape
    if width % 2:
        raise ValueError(f"gate_up_T2I has rows of {width}; gate and up need an even number.")
    y_TI = torch.empty((num_tokens, width // 2), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
    run(silu_mul_launch(gate_up_T2I, y_TI))
    return y_TI
