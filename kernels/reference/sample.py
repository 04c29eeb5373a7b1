"""Choice of the next token: temperature, top_k, top_p, min_p, then the inverse transform.

Filters compare logits, which order tokens as their probabilities do but without rounding.
"""

import torch
from torch import Tensor

from pageray.kernels.ops import SamplingRows


def sample(logits_RV: Tensor, rows: SamplingRows) -> Tensor:
    """int64 [R]; `Ops.sample` has the contract. A NaN logit counts as -inf."""
    logits_RV = torch.where(logits_RV.isnan(), -torch.inf, logits_RV)
    tokens = [
        _sample_row(
            logits_RV[row],
            temperature=rows.temperature_R[row].item(),
            top_k=int(rows.top_k_R[row].item()),
            top_p=rows.top_p_R[row].item(),
            min_p=rows.min_p_R[row].item(),
            uniform=rows.uniform_R[row].item(),
        )
        for row in range(logits_RV.shape[0])
    ]
    return torch.tensor(tokens, dtype=torch.int64, device=logits_RV.device)


def _sample_row(
    logits_V: Tensor, *, temperature: float, top_k: int, top_p: float, min_p: float, uniform: float
) -> int:
    if temperature == 0.0:
        return int(logits_V.argmax().item())
    weights_V = relative_weights(logits_V, temperature)
    is_kept_V = kept_tokens(logits_V, weights_V, top_k=top_k, top_p=top_p, min_p=min_p)
    weights_V = torch.where(is_kept_V, weights_V, 0.0)
    running_V = weights_V.cumsum(dim=0)
    is_past_V = running_V > uniform * running_V[-1]
    if is_past_V.any():
        return int(is_past_V.int().argmax().item())
    # uniform * total may round up to total.
    return int(weights_V.nonzero()[-1].item())


def relative_weights(logits_V: Tensor, temperature: float) -> Tensor:
    """float64 [V]: p / max p. Tokens at the maximum weigh 1, also where it is infinite."""
    largest = logits_V.max()
    weights_V = ((logits_V.double() - largest) / temperature).exp()
    return torch.where(logits_V == largest, 1.0, weights_V)


def kept_tokens(
    logits_V: Tensor, weights_V: Tensor, *, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """bool [V]: the tokens that top_k, then top_p, then min_p leave."""
    is_kept_V = torch.ones_like(logits_V, dtype=torch.bool)
    if 0 < top_k < logits_V.shape[0]:
        is_kept_V = logits_V >= logits_V.topk(top_k).values[-1]
    if top_p < 1.0:
        kept = torch.where(is_kept_V, weights_V, 0.0)
        order = logits_V.sort(descending=True)
        running = kept[order.indices].cumsum(dim=0)
        last_kept = int((running >= top_p * running[-1]).int().argmax().item())
        is_kept_V = is_kept_V & (logits_V >= order.values[last_kept])
    return is_kept_V & (weights_V >= min_p)
