"""Choice of the next token: temperature, top_k, top_p, min_p, then the inverse transform.

With l a row's logits and w = exp((l - max l) / temperature), so that w = p / max p:
    top_k keeps l >= a, a the largest logit with #{l >= a} >= top_k;
    top_p keeps l >= b, b the largest logit with mass{l >= b} >= top_p * mass{l >= a};
    min_p keeps w >= min_p;
    the token is the first in id order whose running mass of kept w exceeds uniform * total.
No sort: a and b are found by bisection over order-preserving integer codes of the logits, which
ends at the exact value after at most 32 passes over the row, and equal logits stay together.

Filters compare logits, which order tokens as probabilities do but without rounding. w is float32
(relative error about 1e-6), masses are float64 sums: against exact arithmetic a token can change
hands only where a boundary is that close. A NaN logit counts as -inf.

Shapes: logits_RV float32, everything else [R]. One program per row; a row is read many times,
but from the L2 cache.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportOperatorIssue=false, reportArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import torch
import triton
import triton.language as tl
from torch import Tensor

from pageray.kernels.gpu.checks import (
    check_dtype,
    check_last_dim_contiguous,
    check_ndim,
    check_vector,
)
from pageray.kernels.gpu.launch import Launch, run
from pageray.kernels.ops import SamplingRows

_MAX_BLOCK_V = 4096

_LOWEST_CODE: tl.constexpr = tl.constexpr(-(2**31))
_HIGHEST_CODE: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def _code(logit):
    """int32 in the order of the float32 values; 0.0 and -0.0 have one code."""
    bits = tl.where(logit == 0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load(row_ptr, v_V, V):
    """(logit, code) of a tile. Past the end the code is lower than that of any logit."""
    logit_V = tl.load(row_ptr + v_V, mask=v_V < V, other=float("-inf"))
    logit_V = tl.where(logit_V == logit_V, logit_V, float("-inf"))
    return logit_V, tl.where(v_V < V, _code(logit_V), _LOWEST_CODE)


@triton.jit
def _weights(logit_V, largest, temperature):
    """p / max p. Logits at the maximum weigh 1, also where it is infinite."""
    weight_V = tl.exp(tl.div_rn(logit_V - largest, temperature))
    return tl.where(logit_V == largest, 1.0, weight_V)


@triton.jit
def _argmax(row_ptr, V, BLOCK_V: tl.constexpr):
    """(largest logit, its lowest id)."""
    largest = tl.full((), float("-inf"), tl.float32)
    token = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK_V):
        logit_V, _ = _load(row_ptr, start + tl.arange(0, BLOCK_V), V)
        block_largest = tl.max(logit_V, axis=0)
        if block_largest > largest:
            largest = block_largest
            token = start + tl.argmax(logit_V, axis=0, tie_break_left=True)
    return largest, token


@triton.jit
def _measure(
    row_ptr, V, threshold, largest, temperature, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr
):
    """(measure of the codes at or above the threshold, the least of them, the greatest below).

    The measure is their mass or their number, in float64. Adding terms that are not negative in
    a fixed order is monotone in each term, rounding included, so a higher threshold never
    measures more: bisection may rely on it.
    """
    measure = tl.zeros((), tl.float64)
    above = tl.full((), _HIGHEST_CODE, tl.int32)
    below = tl.full((), _LOWEST_CODE, tl.int32)
    for start in range(0, V, BLOCK_V):
        logit_V, code_V = _load(row_ptr, start + tl.arange(0, BLOCK_V), V)
        is_above_V = code_V >= threshold
        weight_V = _weights(logit_V, largest, temperature) if BY_MASS else is_above_V
        weight_V = tl.where(is_above_V, weight_V.to(tl.float64), 0.0)
        measure += tl.sum(weight_V, axis=0)
        least = tl.min(tl.where(is_above_V, code_V, _HIGHEST_CODE), axis=0)
        greatest = tl.max(tl.where(is_above_V, _LOWEST_CODE, code_V), axis=0)
        above = tl.minimum(above, least)
        below = tl.maximum(below, greatest)
    return measure, above, below


@triton.jit
def _find_threshold(
    row_ptr,
    V,
    low,
    high,
    needed,
    largest,
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The greatest code in low .. high whose measure is at least `needed`; that of `low` is.

    Each pass moves an end to the nearest code that occurs, so few passes suffice.
    """
    while low < high:
        middle = ((low.to(tl.int64) + high.to(tl.int64) + 1) >> 1).to(tl.int32)
        measure, above, below = _measure(row_ptr, V, middle, largest, temperature, BY_MASS, BLOCK_V)
        if measure >= needed:
            low = above
        else:
            high = tl.maximum(below, low)
        if measure == needed:
            high = low  # This is the set; a closer look would find the same.
    return low


@triton.jit
def _kept_weights(row_ptr, v_V, V, threshold, min_p, largest, temperature):
    """float64 weights of a tile, 0 where filtered out."""
    logit_V, code_V = _load(row_ptr, v_V, V)
    weight_V = _weights(logit_V, largest, temperature)
    is_kept_V = (code_V >= threshold) & (weight_V >= min_p)
    return tl.where(is_kept_V, weight_V, 0.0).to(tl.float64)


@triton.jit
def _inverse_transform(
    row_ptr, V, threshold, min_p, largest, temperature, uniform, BLOCK_V: tl.constexpr
):
    """The first kept id whose running mass exceeds uniform * total."""
    total = tl.zeros((), tl.float64)
    for start in range(0, V, BLOCK_V):
        v_V = start + tl.arange(0, BLOCK_V)
        weight_V = _kept_weights(row_ptr, v_V, V, threshold, min_p, largest, temperature)
        total += tl.sum(weight_V, axis=0)
    target = uniform * total
    running = tl.zeros((), tl.float64)
    chosen = tl.full((), _HIGHEST_CODE, tl.int32)
    last_kept = tl.zeros((), tl.int32)
    for start in range(0, V, BLOCK_V):
        v_V = start + tl.arange(0, BLOCK_V)
        weight_V = _kept_weights(row_ptr, v_V, V, threshold, min_p, largest, temperature)
        # A parallel prefix sum need not be monotone: only tokens with mass may be chosen, and if
        # rounding lets none pass the target, the last one with mass is.
        is_past_V = (weight_V > 0) & (running + tl.cumsum(weight_V, axis=0) > target)
        chosen = tl.minimum(chosen, tl.min(tl.where(is_past_V, v_V, _HIGHEST_CODE), axis=0))
        last_kept = tl.maximum(last_kept, tl.max(tl.where(weight_V > 0, v_V, 0), axis=0))
        running += tl.sum(weight_V, axis=0)
    return tl.where(chosen < V, chosen, last_kept)


# Grid: (R,).
@triton.jit
def sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    token_ptr,
    stride_R,
    V,
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_R
    largest, token = _argmax(row_ptr, V, BLOCK_V)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        highest = _code(largest)
        threshold = _code(tl.full((), float("-inf"), tl.float32))
        if (top_k > 0) & (top_k < V):
            threshold = _find_threshold(
                row_ptr, V, threshold, highest, top_k, largest, temperature, False, BLOCK_V
            )
        if top_p < 1.0:
            left, _, _ = _measure(row_ptr, V, threshold, largest, temperature, True, BLOCK_V)
            needed = top_p.to(tl.float64) * left
            threshold = _find_threshold(
                row_ptr, V, threshold, highest, needed, largest, temperature, True, BLOCK_V
            )
        min_p = tl.load(min_p_ptr + row)
        uniform = tl.load(uniform_ptr + row)
        token = _inverse_transform(
            row_ptr, V, threshold, min_p, largest, temperature, uniform, BLOCK_V
        )
    tl.store(token_ptr + row, token.to(tl.int64))


def sample_launch(logits_RV: Tensor, rows: SamplingRows, token_R: Tensor) -> Launch:
    """One token id per row into token_R."""
    num_rows, vocab_size = logits_RV.shape
    return Launch(
        kernel=sample_kernel,
        grid=(num_rows,),
        args={
            "logits_ptr": logits_RV,
            "temperature_ptr": rows.temperature_R,
            "top_k_ptr": rows.top_k_R,
            "top_p_ptr": rows.top_p_R,
            "min_p_ptr": rows.min_p_R,
            "uniform_ptr": rows.uniform_R,
            "token_ptr": token_R,
            "stride_R": logits_RV.stride(0),
            "V": vocab_size,
        },
        constants={"BLOCK_V": min(_MAX_BLOCK_V, triton.next_power_of_2(vocab_size))},
        num_warps=8,
    )


def sample(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """int64 [R]; `Ops.sample` has the contract."""
    check_dtype("logits_RV", logits_RV, (torch.float32,))
    check_ndim("logits_RV", logits_RV, 2)
    check_last_dim_contiguous("logits_RV", logits_RV)
    num_rows, vocab_size = logits_RV.shape
    if vocab_size == 0:
        raise ValueError("logits_RV has no columns; there is no token to choose.")
    check_vector("temperature_R", rows.temperature_R, num_rows, torch.float32)
    check_vector("top_k_R", rows.top_k_R, num_rows, torch.int32)
    check_vector("top_p_R", rows.top_p_R, num_rows, torch.float32)
    check_vector("min_p_R", rows.min_p_R, num_rows, torch.float32)
    check_vector("uniform_R", rows.uniform_R, num_rows, torch.float64)
    token_R = torch.empty(num_rows, dtype=torch.int64, device=logits_RV.device)
    run(sample_launch(logits_RV, rows, token_R))
    return token_R
