"""Decode steps replayed from captured graphs: the host launches one graph instead of every kernel.

A graph repeats its launches with the same grids and addresses, so it takes steps of one shape:
one query per sequence, padded to the next captured number of sequences. Everything else, prefill
above all, goes to the eager runner.

Nothing in Python runs during a replay, so the model's `LayerProgress` is not told: whoever
waits for single layers sees all of them at once, when the rank acknowledges the step.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from pageray.workers.graphs.backend import GraphBackend, Work
from pageray.workers.graphs.buffers import DecodeBuffers
from pageray.workers.graphs.ladder import GraphLadder, GraphShape
from pageray.workers.models.llama import LlamaModel
from pageray.workers.step_inputs import StepInputs
from pageray.workers.step_runner import EagerRunner, StepRunner


class GraphRunner:
    """A `StepRunner` with a replay for each shape of `ladder` and `eager` for the other steps."""

    def __init__(
        self,
        eager: StepRunner,
        ladder: GraphLadder,
        buffers: DecodeBuffers,
        replays: Mapping[GraphShape, Work],
    ) -> None:
        self._eager = eager
        self._ladder = ladder
        self._buffers = buffers
        self._replays = replays

    @torch.inference_mode()
    def run(self, inputs: StepInputs) -> Tensor | None:
        shape = self._shape_of(inputs)
        if shape is None:
            return self._eager.run(inputs)
        self._buffers.first(shape.num_sequences).fill(inputs)
        logits = self._replays[shape]()
        if logits is None:
            return None
        num_sequences = inputs.token_ids_T.shape[0]
        if inputs.logit_rows_R.shape[0] == num_sequences:
            return logits[:num_sequences]
        return logits.index_select(0, inputs.logit_rows_R.to(logits.device))

    def _shape_of(self, inputs: StepInputs) -> GraphShape | None:
        if inputs.batch.max_query_len > 1:
            return None
        return self._ladder.pick(inputs.token_ids_T.shape[0], inputs.batch.max_kv_len)


class DecodeGraphs:
    """Captures a model's decode steps over buffers of its own."""

    def __init__(
        self,
        model: LlamaModel,
        pool: Tensor,
        *,
        ladder: GraphLadder,
        table_width: int,
        backend: GraphBackend,
    ) -> None:
        """`pool`: [B, L, 2, K, P, D]. `table_width`: blocks of the longest sequence."""
        self._model = model
        self._pool = pool
        self._ladder = ladder
        self._backend = backend
        self._buffers = DecodeBuffers.allocate(ladder.sizes[-1], table_width, pool.device)

    def capture_all(self) -> GraphRunner:
        """Take every shape of the ladder. All ranks do this together: a capture runs collectives,
        and all of them have the same shapes in the same order."""
        replays = {shape: self.capture(shape) for shape in self._ladder.shapes()}
        eager = EagerRunner(self._model, self._pool)
        return GraphRunner(eager, self._ladder, self._buffers, replays)

    @torch.inference_mode()
    def capture(self, shape: GraphShape) -> Work:
        """The step of `shape` over the first rows of the buffers, which are still padding."""
        rows = self._buffers.first(shape.num_sequences)
        batch = rows.batch(shape.max_kv_len)

        def forward() -> Tensor | None:
            return self._model.forward(
                rows.token_ids_M,
                rows.positions_M,
                self._pool,
                rows.slot_mapping_M,
                batch,
                rows.rows_M,
            )

        return self._backend.capture(forward)
