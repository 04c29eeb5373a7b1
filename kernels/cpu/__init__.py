"""Every operation on the CPU, in Numba; `vectors.py` and `matrix_tile.py` down to LLVM.

Anatomy of a file: the formula, the launcher that checks and counts, the kernel for a range of rows,
and the kernel that spreads the rows over threads.
"""

from dataclasses import replace

from pageray.kernels.cpu.blocks import (
    pack_attention,
    pack_attention_int8,
    pack_mlp,
    pack_mlp_int8,
)
from pageray.kernels.cpu.copy_blocks import copy_blocks
from pageray.kernels.cpu.draw_uniform import draw_uniform
from pageray.kernels.cpu.layer_stack import stack_layers
from pageray.kernels.cpu.linear import pack_linear, pack_linear_int8
from pageray.kernels.cpu.paged_attention import paged_attention
from pageray.kernels.cpu.penalties import apply_penalties
from pageray.kernels.cpu.rms_norm import add_rms_norm, rms_norm
from pageray.kernels.cpu.rope_write_kv import rope_write_kv
from pageray.kernels.cpu.sample import sample
from pageray.kernels.cpu.silu_mul import silu_mul
from pageray.kernels.cpu.warm_up import LayerShape, warm_up
from pageray.kernels.ops import Ops

__all__ = ["INT8_OPS", "OPS", "LayerShape", "warm_up"]

OPS = Ops(
    name="cpu",
    pack_linear=pack_linear,
    pack_attention=pack_attention,
    pack_mlp=pack_mlp,
    stack_layers=stack_layers,
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

INT8_OPS = replace(
    OPS,
    name="cpu-int8",
    pack_linear=pack_linear_int8,
    pack_attention=pack_attention_int8,
    pack_mlp=pack_mlp_int8,
)
"""The same with weights rounded to 8 bits, which halves what a decode step reads."""
