"""Every operation that has a kernel. A new one is a function that makes a call, and a line here."""

import torch

from pageray.kernels.gpu.model_launches import MODEL_SHAPES, ModelShape
from pageray.router.bench.gpu_check import attention_cases, layer_cases, sampling_cases
from pageray.router.bench.gpu_check.kernel_call import KernelCase

LAYER_CASES = (
    KernelCase("rms_norm", layer_cases.rms_norm),
    KernelCase("add_rms_norm", layer_cases.add_rms_norm),
    KernelCase("linear", layer_cases.linear),
    KernelCase("rope_write_kv", layer_cases.rope_write_kv),
    KernelCase("paged_attention", attention_cases.mixed_attention),
    KernelCase("silu_mul", layer_cases.silu_mul),
    KernelCase("mlp", layer_cases.mlp),
    KernelCase("copy_blocks", layer_cases.copy_blocks),
)
"""Called with tokens, in the model's dtype."""

SAMPLING_CASES = (
    KernelCase("apply_penalties", sampling_cases.apply_penalties),
    KernelCase("draw_uniform", sampling_cases.draw_uniform),
    KernelCase("sample", sampling_cases.sample),
)
"""Called with rows of float32 logits, whatever the model's dtype."""

TINY = ModelShape(
    name="tiny",
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    vocab_size=300,
    window=0,
)


def shapes(is_quick: bool) -> tuple[ModelShape, ...]:
    return (TINY,) if is_quick else MODEL_SHAPES


def dtypes(is_quick: bool) -> tuple[torch.dtype, ...]:
    return (torch.float32,) if is_quick else (torch.bfloat16, torch.float16, torch.float32)
