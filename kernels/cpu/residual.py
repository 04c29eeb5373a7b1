"""Checks of what a decoder layer's blocks are given."""

from torch import Tensor

from pageray.kernels.cpu.memory import require_float, require_shape


def check_residual(x_TE: Tensor | None, residual_TE: Tensor, width: int) -> None:
    """Raises ValueError unless residual is [T, width] and x like it, both contiguous."""
    require_float("residual", residual_TE)
    require_shape("residual", residual_TE, residual_TE.shape[0], width)
    if x_TE is None:
        x_TE = residual_TE
    require_shape("x", x_TE, *residual_TE.shape)
    if x_TE.dtype is not residual_TE.dtype:
        raise ValueError(f"x is {x_TE.dtype} and residual {residual_TE.dtype}; both must be one")
    if not (x_TE.is_contiguous() and residual_TE.is_contiguous()):
        raise ValueError(
            f"x and residual must be contiguous; x has strides {x_TE.stride()}, residual "
            f"{residual_TE.stride()}"
        )
