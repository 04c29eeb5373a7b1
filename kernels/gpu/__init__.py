"""Every operation for CUDA devices, in Triton; `reference/` defines what each must compute.

With TRITON_INTERPRET=1 in the environment before the first import the same kernels run
interpreted on CPU tensors: slow, but the same semantics, which is how they are tested without a
GPU.
"""

from pageray.kernels.composed_blocks import Operations
from pageray.kernels.gpu.copy_blocks import copy_blocks
from pageray.kernels.gpu.draw_uniform import draw_uniform
from pageray.kernels.gpu.gather_pages import gather_pages, scatter_pages
from pageray.kernels.gpu.linear import pack_linear
from pageray.kernels.gpu.paged_attention import paged_attention
from pageray.kernels.gpu.penalties import apply_penalties
from pageray.kernels.gpu.rms_norm import add_rms_norm, rms_norm
from pageray.kernels.gpu.rope_write_kv import rope_write_kv
from pageray.kernels.gpu.sample import sample
from pageray.kernels.gpu.silu_mul import silu_mul
from pageray.kernels.ops import Ops, never_stacked

__all__ = ["OPS", "gather_pages", "scatter_pages"]

_BLOCKS = Operations(
    pack_linear=pack_linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_write_kv=rope_write_kv,
    paged_attention=paged_attention,
    silu_mul=silu_mul,
)

OPS = Ops(
    name="gpu",
    pack_linear=pack_linear,
    pack_attention=_BLOCKS.pack_attention,
    pack_mlp=_BLOCKS.pack_mlp,
    stack_layers=never_stacked,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rope_write_kv=rope_write_kv,
    silu_mul=silu_mul,
    copy_blocks=copy_blocks,
    paged_attention=paged_attention,
    apply_penalties=apply_penalties,
    draw_uniform=draw_uniform,
    sample=sample,
)
