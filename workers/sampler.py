"""From logits to tokens, on rank 0: minimum length, penalties, filters, the draw, logprobs.

The randomness of token i is a function of (request seed, sequence index, i) alone, so a sequence
that was preempted, moved or resubmitted goes on exactly as it would have.
"""

from collections.abc import Sequence as SequenceOf
from typing import cast

import numpy as np
import torch
from torch import Tensor

from pageray.cluster.generation import TokenLogprobs
from pageray.kernels.ops import Ops, PenaltyRows, SamplingRows
from pageray.workers.sequence_store import SequenceStore, StoredSequence


class Sampler:
    def __init__(self, ops: Ops, eos_token_ids: tuple[int, ...]) -> None:
        self._ops = ops
        self._eos_token_ids = eos_token_ids

    def sample(
        self, logits_RV: Tensor, sequences: SequenceOf[StoredSequence], store: SequenceStore
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """One token and, where asked for, its logprobs for each row. Overwrites `logits_RV`."""
        wanted = [sequence.sampling.logprobs for sequence in sequences]
        # Log-probabilities are the model's own: taken before penalties and filters.
        logprobs_RV = (
            torch.log_softmax(logits_RV, dim=-1) if any(k is not None for k in wanted) else None
        )
        self._forbid_early_ends(logits_RV, sequences)
        self._apply_penalties(logits_RV, sequences, store)
        token_ids = _ints(self._ops.sample(logits_RV, self._rows(sequences, logits_RV.device)))
        if logprobs_RV is None:
            return token_ids, [None] * len(token_ids)
        return token_ids, [
            None if top is None else _token_logprobs(row, token_id, top)
            for row, token_id, top in zip(logprobs_RV, token_ids, wanted, strict=True)
        ]

    def _forbid_early_ends(self, logits_RV: Tensor, sequences: SequenceOf[StoredSequence]) -> None:
        """Until min_tokens are out, no token may be drawn that would end the sequence."""
        for row, sequence in enumerate(sequences):
            sampling = sequence.sampling
            if sequence.num_tokens - sequence.num_prompt_tokens < sampling.min_tokens:
                forbidden = list(sampling.stop_token_ids)
                if not sampling.ignore_eos:
                    forbidden += self._eos_token_ids
                logits_RV[row, forbidden] = -torch.inf

    def _apply_penalties(
        self, logits_RV: Tensor, sequences: SequenceOf[StoredSequence], store: SequenceStore
    ) -> None:
        penalised = [
            (row, sequence)
            for row, sequence in enumerate(sequences)
            if sequence.sampling.has_penalties
        ]
        if not penalised:
            return
        device = logits_RV.device
        lengths = [sequence.num_tokens for _, sequence in penalised]
        history = np.concatenate(
            [store.token_ids[sequence.row, : sequence.num_tokens] for _, sequence in penalised]
        )

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._ops.apply_penalties(
            logits_RV,
            PenaltyRows(
                rows_R=torch.tensor([row for row, _ in penalised], device=device),
                history_N=torch.from_numpy(history).to(device),
                starts_R1=torch.tensor(np.cumsum([0, *lengths]), device=device),
                prompt_lens_R=torch.tensor(
                    [sequence.num_prompt_tokens for _, sequence in penalised], device=device
                ),
                repetition_R=floats([s.sampling.repetition_penalty for _, s in penalised]),
                presence_R=floats([s.sampling.presence_penalty for _, s in penalised]),
                frequency_R=floats([s.sampling.frequency_penalty for _, s in penalised]),
            ),
        )

    def _rows(self, sequences: SequenceOf[StoredSequence], device: torch.device) -> SamplingRows:
        settings = [sequence.sampling for sequence in sequences]
        if all(sampling.is_greedy for sampling in settings):
            uniform = torch.zeros(len(settings), dtype=torch.float64, device=device)
        else:
            uniform = self._ops.draw_uniform(
                torch.tensor([sequence.seed for sequence in sequences], device=device),
                torch.tensor([sequence.index for sequence in sequences], device=device),
                torch.tensor([sequence.num_tokens for sequence in sequences], device=device),
            )

        def floats(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        return SamplingRows(
            temperature_R=floats([sampling.temperature for sampling in settings]),
            # -1 is vLLM's other way to say "all".
            top_k_R=torch.tensor(
                [max(0, sampling.top_k) for sampling in settings],
                dtype=torch.int32,
                device=device,
            ),
            top_p_R=floats([sampling.top_p for sampling in settings]),
            min_p_R=floats([sampling.min_p for sampling in settings]),
            uniform_R=uniform,
        )


def _token_logprobs(logprobs_V: Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    top = torch.topk(logprobs_V, num_top)
    top_logprobs = cast("list[float]", top.values.tolist())
    return TokenLogprobs(
        float(logprobs_V[token_id]), tuple(_ints(top.indices)), tuple(top_logprobs)
    )


def _ints(x: Tensor) -> list[int]:
    return cast("list[int]", x.tolist())
