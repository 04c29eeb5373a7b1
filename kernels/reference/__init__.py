"""Every operation in plain torch: the definition of correct, on any device."""

from pageray.kernels.composed_blocks import Operations
from pageray.kernels.ops import Ops, never_stacked
from pageray.kernels.reference.copy_blocks import copy_blocks
from pageray.kernels.reference.draw_uniform import draw_uniform
from pageray.kernels.reference.gather_pages import gather_pages, scatter_pages
from pageray.kernels.reference.linear import pack_linear
from pageray.kernels.reference.paged_attention import paged_attention
from pageray.kernels.reference.penalties import apply_penalties
from pageray.kernels.reference.rms_norm import add_rms_norm, rms_norm
from pageray.kernels.reference.rope_write_kv import rope_write_kv
from pageray.kernels.reference.sample import sample
from pageray.kernels.reference.silu_mul import silu_mul

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
    name="reference",
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
