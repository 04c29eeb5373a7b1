"""Calls of what turns logits into tokens; `num_tokens` is the number of rows."""

import torch
from torch import Tensor

from pageray.kernels.ops import Ops, PenaltyRows, SamplingRows
from pageray.router.bench.gpu_check.kernel_call import KernelCall, Setting, Tensors, num_bytes

_HISTORY_LEN = 200
_SPREAD = 4.0
"""Standard deviation of the logits: peaked enough that a draw near the border between two tokens,
where rounding decides, is too rare to occur."""


def sample(setting: Setting) -> KernelCall:
    """Every third row greedy, the others with temperature, top_k, top_p and min_p."""
    rows = setting.num_tokens
    logits_RV = _logits(setting)
    greedy_R = torch.arange(rows, device=setting.device) % 3 == 0
    tensors = {
        "logits": logits_RV,
        "temperature": torch.where(greedy_R, 0.0, 0.8),
        "top_k": torch.full((rows,), 50, dtype=torch.int32, device=setting.device),
        "top_p": torch.full((rows,), 0.9, device=setting.device),
        "min_p": torch.full((rows,), 0.01, device=setting.device),
        "uniform": torch.rand(
            rows, dtype=torch.float64, device=setting.device, generator=setting.generator
        ),
    }

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        sampling = SamplingRows(
            temperature_R=given["temperature"],
            top_k_R=given["top_k"],
            top_p_R=given["top_p"],
            min_p_R=given["min_p"],
            uniform_R=given["uniform"],
        )
        return (ops.sample(given["logits"], sampling),)

    return KernelCall(tensors=tensors, call=call, num_bytes=num_bytes(logits_RV))


def apply_penalties(setting: Setting) -> KernelCall:
    """On every row, with a history of 200 tokens, half of them the prompt's."""
    rows, device = setting.num_tokens, setting.device
    logits_RV = _logits(setting)
    history_N = torch.randint(
        setting.shape.vocab_size,
        (rows * _HISTORY_LEN,),
        device=device,
        generator=setting.generator,
    )
    tensors = {
        "logits": logits_RV,
        "history": history_N,
        "rows": torch.arange(rows, device=device),
        "starts": torch.arange(rows + 1, device=device) * _HISTORY_LEN,
        "prompt_lens": torch.full((rows,), _HISTORY_LEN // 2, device=device),
        "repetition": torch.full((rows,), 1.25, device=device),
        "penalty": torch.full((rows,), 0.5, device=device),
    }

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        penalties = PenaltyRows(
            rows_R=given["rows"],
            history_N=given["history"],
            starts_R1=given["starts"],
            prompt_lens_R=given["prompt_lens"],
            repetition_R=given["repetition"],
            presence_R=given["penalty"],
            frequency_R=given["penalty"],
        )
        ops.apply_penalties(given["logits"], penalties)
        return (given["logits"],)

    return KernelCall(
        tensors=tensors, call=call, num_bytes=num_bytes(logits_RV, logits_RV, history_N)
    )


def draw_uniform(setting: Setting) -> KernelCall:
    numbers_R = torch.randint(
        2**40, (setting.num_tokens,), device=setting.device, generator=setting.generator
    )

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        return (ops.draw_uniform(given["seed"], given["index"], given["position"]),)

    return KernelCall(
        tensors={"seed": numbers_R, "index": numbers_R % 8, "position": numbers_R.flip(0)},
        call=call,
        num_bytes=num_bytes(*[numbers_R] * 4),
    )


def _logits(setting: Setting) -> Tensor:
    size = (setting.num_tokens, setting.shape.vocab_size)
    return _SPREAD * torch.randn(size, device=setting.device, generator=setting.generator)
