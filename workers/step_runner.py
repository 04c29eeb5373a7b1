"""The seam between a rank and the way it runs the model: launch by launch, or from graphs."""

from typing import Protocol

import torch
from torch import Tensor

from pageray.workers.models.llama import LlamaModel
from pageray.workers.step_inputs import StepInputs


class StepRunner(Protocol):
    def run(self, inputs: StepInputs) -> Tensor | None:
        """Write the KV of a step's tokens (host tensors in `inputs`) and compute its logits.

        Returns float32 [R, vocab_size] on rank 0, None on the others. The caller may overwrite
        the logits; they are valid until the next `run`.
        """
        ...


class EagerRunner:
    """Every kernel is launched by the host, in every step."""

    def __init__(self, model: LlamaModel, pool: Tensor) -> None:
        """`pool`: [B, L, 2, K, P, D], on the model's device."""
        self._model = model
        self._pool = pool

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Tensor | None:
        placed = inputs.to(self._pool.device)
        return self._model.forward(
            placed.token_ids_T,
            placed.positions_T,
            self._pool,
            placed.slot_mapping_T,
            placed.batch,
            placed.logit_rows_R,
        )
