"""Calls of the operations of a decoder layer, but for attention. Shapes as in `kernels/ops.py`."""

import torch
from torch import Tensor

from pageray.kernels.ops import KvScales, MlpWeights, Ops, QkNorm, RopeStep
from pageray.router.bench.gpu_check.kernel_call import KernelCall, Setting, Tensors, num_bytes

EPS = 1e-6
BLOCK_SIZE = 16


def randn(setting: Setting, *size: int) -> Tensor:
    return torch.randn(
        size, dtype=setting.dtype, device=setting.device, generator=setting.generator
    )


def rms_norm(setting: Setting) -> KernelCall:
    x_TE = randn(setting, setting.num_tokens, setting.shape.hidden_size)
    weight_E = randn(setting, setting.shape.hidden_size)

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        return (ops.rms_norm(given["x"], given["weight"], EPS),)

    return KernelCall(
        tensors={"x": x_TE, "weight": weight_E},
        call=call,
        num_bytes=num_bytes(x_TE, x_TE, weight_E),
    )


def add_rms_norm(setting: Setting) -> KernelCall:
    x_TE = randn(setting, setting.num_tokens, setting.shape.hidden_size)
    weight_E = randn(setting, setting.shape.hidden_size)

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        y_TE = ops.add_rms_norm(given["x"], given["residual"], given["weight"], EPS)
        return y_TE, given["residual"]

    return KernelCall(
        tensors={"x": x_TE, "residual": x_TE.flip(0), "weight": weight_E},
        call=call,
        num_bytes=num_bytes(*[x_TE] * 4, weight_E),
    )


def rope_write_kv(setting: Setting) -> KernelCall:
    """A table row for each token, and a slot of its own, at random; one token is skipped."""
    shape, num_tokens = setting.shape, setting.num_tokens
    num_heads = shape.num_heads + 2 * shape.num_kv_heads
    qkv_TAD = randn(setting, num_tokens, num_heads, shape.head_dim)
    frequencies = 10_000.0 ** -torch.linspace(0, 1, shape.head_dim // 2, device=setting.device)
    angles = torch.outer(torch.arange(num_tokens, device=setting.device), frequencies)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    slots_T = _permutation(setting, num_blocks * BLOCK_SIZE)[:num_tokens]
    slots_T[0] = -1
    tensors = {
        "qkv": qkv_TAD,
        "pool": randn(setting, num_blocks, 2, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim),
        "positions": _permutation(setting, num_tokens),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), dim=1),
        "slots": slots_T,
    }
    if shape.has_qk_norm:
        tensors["q_norm"] = randn(setting, shape.head_dim)
        tensors["k_norm"] = randn(setting, shape.head_dim)

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        step = RopeStep(
            positions_T=given["positions"],
            cos_sin_LD=given["cos_sin"],
            slot_mapping_T=given["slots"],
        )
        norm = None
        if shape.has_qk_norm:
            norm = QkNorm(q_norm_D=given["q_norm"], k_norm_D=given["k_norm"], eps=EPS)
        q_THD = ops.rope_write_kv(given["qkv"], given["pool"][:, 1], step, norm, KvScales())
        return q_THD, given["pool"]

    # Everything is read; queries are written back, keys and values to the pool.
    moved = num_bytes(qkv_TAD, qkv_TAD, slots_T, tensors["positions"], tensors["cos_sin"])
    return KernelCall(tensors=tensors, call=call, num_bytes=moved)


def _permutation(setting: Setting, count: int) -> Tensor:
    return torch.randperm(count, device=setting.device, generator=setting.generator)


def silu_mul(setting: Setting) -> KernelCall:
    gate_up_T2I = randn(setting, setting.num_tokens, 2 * setting.shape.intermediate_size)

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        return (ops.silu_mul(given["gate_up"]),)

    return KernelCall(
        tensors={"gate_up": gate_up_T2I},
        call=call,
        num_bytes=num_bytes(gate_up_T2I) * 3 // 2,
    )


def linear(setting: Setting) -> KernelCall:
    """The largest projection of a layer: gate and up."""
    num_inputs, num_outputs = setting.shape.hidden_size, 2 * setting.shape.intermediate_size
    x_TE = randn(setting, setting.num_tokens, num_inputs)
    weight_OE = randn(setting, num_outputs, num_inputs)

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        return (ops.pack_linear(given["weight"], None)(given["x"]),)

    output_bytes = setting.num_tokens * num_outputs * setting.dtype.itemsize
    return KernelCall(
        tensors={"x": x_TE, "weight": weight_OE},
        call=call,
        num_bytes=num_bytes(x_TE, weight_OE) + output_bytes,
        num_flops=2 * setting.num_tokens * num_inputs * num_outputs,
    )


def mlp(setting: Setting) -> KernelCall:
    shape, num_tokens = setting.shape, setting.num_tokens
    x_TE = randn(setting, num_tokens, shape.hidden_size)
    # Scaled so that what the products add up stays near 1.
    gate_up_2IE = randn(setting, 2 * shape.intermediate_size, shape.hidden_size)
    down_EI = randn(setting, shape.hidden_size, shape.intermediate_size)
    gate_up_2IE /= shape.hidden_size**0.5
    down_EI /= shape.intermediate_size**0.5
    tensors = {
        "x": x_TE,
        "residual": x_TE.flip(0),
        "norm": randn(setting, shape.hidden_size),
        "gate_up": gate_up_2IE,
        "down": down_EI,
    }

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        weights = MlpWeights(
            norm_E=given["norm"],
            eps=EPS,
            gate_up_2IE=given["gate_up"],
            gate_up_bias_2I=None,
            down_EI=given["down"],
            down_bias_E=None,
        )
        return ops.pack_mlp(weights)(given["x"], given["residual"]), given["residual"]

    hidden_bytes = 3 * num_tokens * shape.intermediate_size * setting.dtype.itemsize
    return KernelCall(
        tensors=tensors,
        call=call,
        num_bytes=num_bytes(*tensors.values(), *[x_TE] * 4) + 2 * hidden_bytes,
        num_flops=6 * num_tokens * shape.hidden_size * shape.intermediate_size,
    )


def copy_blocks(setting: Setting) -> KernelCall:
    """The first half of a pool's pages over the second; a page for every 16 tokens."""
    shape = setting.shape
    num_pairs = max(1, setting.num_tokens // BLOCK_SIZE)
    record = (shape.num_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    pool = randn(setting, 2 * num_pairs, *record)
    pairs_C2 = torch.arange(2 * num_pairs, device=setting.device).view(2, num_pairs).T.contiguous()

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        ops.copy_blocks(given["pool"], given["pairs"])
        return (given["pool"],)

    return KernelCall(
        tensors={"pool": pool, "pairs": pairs_C2},
        call=call,
        num_bytes=num_bytes(pool, pairs_C2),
    )
