"""Choice of the next token: temperature, top_k, top_p, min_p, then the inverse transform.

With w = exp((logit - max logit) / temperature), which is p / max p:
    top_k keeps logit >= a, a the largest logit with #{logit >= a} >= top_k;
    top_p keeps logit >= b, b the largest logit with w{logit >= b} >= top_p * w{logit >= a};
    min_p keeps w >= min_p.
No sort: a and b come from a radix search (`logit_search.py`). w is float32 and the sums of w are
float64, so against exact arithmetic a token can change hands only within 1e-6 of a boundary.
"""

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.jit import jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.logit_search import Candidates, largest_logit, lowest_kept_logit
from pageray.kernels.cpu.memory import (
    Array,
    Pointer,
    flat,
    pointer,
    require_dtype,
    require_shape,
)
from pageray.kernels.cpu.numerics import ONE, ZERO, exp_of_negative, float64, nan_to_lowest
from pageray.kernels.ops import SamplingRows

_CHUNK = 1024


def sample(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """int64 [R]; `Ops.sample` has the contract. A NaN logit counts as -inf."""
    require_dtype("logits", logits_RV, torch.float32)
    num_rows, vocab_size = logits_RV.shape
    if vocab_size == 0:
        raise ValueError(f"logits has shape {tuple(logits_RV.shape)}; the vocabulary is empty")
    for name, values_R, dtype in (
        ("temperature", rows.temperature_R, torch.float32),
        ("top_k", rows.top_k_R, torch.int32),
        ("top_p", rows.top_p_R, torch.float32),
        ("min_p", rows.min_p_R, torch.float32),
        ("uniform", rows.uniform_R, torch.float64),
    ):
        require_dtype(name, values_R, dtype)
        require_shape(name, values_R, num_rows)
    tokens_R = torch.empty(num_rows, dtype=torch.int64)
    args = (
        pointer(logits_RV),
        (logits_RV.stride(0), vocab_size),
        pointer(rows.temperature_R),
        pointer(rows.top_k_R),
        pointer(rows.top_p_R),
        pointer(rows.min_p_R),
        pointer(rows.uniform_R),
        pointer(tokens_R),
    )
    num_parts = num_threads(num_rows * vocab_size) if num_rows > 1 else 1
    if num_parts == 1:
        _sample_rows(*args, 0, num_rows)
    else:
        _sample_rows_threaded(*args, num_rows, num_parts)
    return tokens_R


@jit
def _sample_rows(
    logits_at: Pointer,
    logits_shape: tuple[int, int],
    temperature_at: Pointer,
    top_k_at: Pointer,
    top_p_at: Pointer,
    min_p_at: Pointer,
    uniform_at: Pointer,
    tokens_at: Pointer,
    start: int,
    stop: int,
) -> None:
    row_stride, vocab_size = logits_shape
    temperature, tokens = flat(temperature_at, 0), flat(tokens_at, 0)
    top_k, top_p, min_p = flat(top_k_at, 0), flat(top_p_at, 0), flat(min_p_at, 0)
    uniform = flat(uniform_at, 0)
    weights = np.empty(vocab_size, dtype=np.float32)
    candidates = (
        np.empty(vocab_size, dtype=np.float32),
        np.empty(vocab_size, dtype=np.float32),
    )
    for row in range(start, stop):
        logits = flat(logits_at, row * row_stride)
        largest = largest_logit(logits, vocab_size)
        if temperature[row] == ZERO:
            tokens[row] = _first_equal(logits, vocab_size, largest)
        else:
            _weigh(logits, largest, temperature[row], weights)
            start_of_search = (largest, temperature[row])
            filters = (top_k[row], top_p[row], min_p[row])
            _filter(logits, weights, filters, start_of_search, candidates)
            tokens[row] = _draw(weights, uniform[row])


@jit_threaded
def _sample_rows_threaded(
    logits_at: Pointer,
    logits_shape: tuple[int, int],
    temperature_at: Pointer,
    top_k_at: Pointer,
    top_p_at: Pointer,
    min_p_at: Pointer,
    uniform_at: Pointer,
    tokens_at: Pointer,
    num_rows: int,
    num_parts: int,
) -> None:
    for index in prange(num_parts):
        start, stop = part(num_rows, num_parts, index)
        _sample_rows(
            logits_at,
            logits_shape,
            temperature_at,
            top_k_at,
            top_p_at,
            min_p_at,
            uniform_at,
            tokens_at,
            start,
            stop,
        )


@jit
def _first_equal(logits: Array, vocab_size: int, largest: float) -> int:
    for token in range(vocab_size):
        if logits[token] == largest:
            return token
    # Only NaN: they count as -inf, all alike.
    return 0


@jit
def _weigh(logits: Array, largest: float, temperature: float, weights: Array) -> None:
    """w = p / max p. Tokens at the maximum weigh 1, also where it is infinite."""
    for token in range(len(weights)):
        logit = nan_to_lowest(logits[token])
        weight = exp_of_negative((logit - largest) / temperature)
        weights[token] = ONE if logit == largest else weight


@jit
def _filter(
    logits: Array,
    weights: Array,
    filters: tuple[int, float, float],
    start_of_search: tuple[float, float],
    candidates: Candidates,
) -> None:
    """Set the weight of every token that is not kept to 0."""
    top_k, top_p, min_p = filters
    if 0 < top_k < len(weights):
        lowest = lowest_kept_logit(
            logits, weights, False, float64(top_k), start_of_search, candidates
        )
        _drop_below(logits, lowest, weights)
    if top_p < ONE:
        target = float64(top_p) * _total(weights, 0, len(weights))
        lowest = lowest_kept_logit(logits, weights, True, target, start_of_search, candidates)
        _drop_below(logits, lowest, weights)
    if min_p > ZERO:
        for token in range(len(weights)):
            weights[token] = weights[token] if weights[token] >= min_p else ZERO


@jit
def _drop_below(logits: Array, lowest: float, weights: Array) -> None:
    for token in range(len(weights)):
        is_kept = nan_to_lowest(logits[token]) >= lowest
        weights[token] = weights[token] if is_kept else ZERO


@jit
def _total(weights: Array, start: int, stop: int) -> float:
    total = 0.0
    for token in range(start, stop):
        total += float64(weights[token])
    return total


@jit
def _draw(weights: Array, uniform: float) -> int:
    """The first token whose running mass exceeds uniform * total mass.

    Chunk by chunk, so that only one chunk's running sum is taken token by token.
    """
    vocab_size = len(weights)
    total = 0.0
    for start in range(0, vocab_size, _CHUNK):
        total += _total(weights, start, min(start + _CHUNK, vocab_size))
    target = uniform * total
    running = 0.0
    last = 0
    for start in range(0, vocab_size, _CHUNK):
        stop = min(start + _CHUNK, vocab_size)
        mass = _total(weights, start, stop)
        if running + mass > target:
            inside = running
            for token in range(start, stop):
                inside += float64(weights[token])
                if weights[token] > ZERO:
                    last = token
                    if inside > target:
                        return token
            return last
        running += mass
    # uniform * total rounded up to total: the last token that weighs anything.
    for token in range(vocab_size):
        if weights[token] > ZERO:
            last = token
    return last
