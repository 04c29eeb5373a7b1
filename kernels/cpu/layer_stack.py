"""Every decoder layer in one call, with the sums over the ranks of this host.

With a few tokens to compute, entering Python for every block takes a quarter of a step. What
differs from layer to layer is where its weights and its pages are: a row of addresses. All else is
that of the first layer, so layers of different kinds do not stack.

Blocks are numbered: attention, MLP, attention, ... A rank that waits in vain for another leaves with
the number of the block whose sum is missing, so that Python can ask whether the other still lives,
and comes back to it.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pageray.kernels.cpu.attention_block import AttentionArguments, FusedAttention, run_attention
from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array
from pageray.kernels.cpu.mlp import FusedMlp, MlpArguments, run_mlp
from pageray.kernels.cpu.panels import at_addresses
from pageray.kernels.cpu.residual import check_residual
from pageray.kernels.cpu.shared_reduce import NOBODY_LATE, sum_over_ranks
from pageray.kernels.cpu.shared_words import store_release
from pageray.kernels.ops import (
    LayerBlocks,
    LayerProgress,
    LayerStack,
    RaggedBatch,
    RankSums,
    RopeStep,
)

_NOBODY = 0
_ALONE = (0, 1, 0, 0)
"""A `RankSums.region` without others."""
_FROM_THE_START = (0, NOBODY_LATE)
_MLP = 10
"""The first column of `FusedMlp.addresses`; those of the attention come before."""

_Arguments = tuple[Array, int, AttentionArguments, MlpArguments, tuple[int, int]]


def stack_layers(layers: Sequence[LayerBlocks], sums: RankSums | None) -> LayerStack | None:
    """None if the layers differ in anything but the numbers of their weights."""
    blocks = [
        (attention, mlp)
        for attention, mlp in layers
        if isinstance(attention, FusedAttention) and isinstance(mlp, FusedMlp)
    ]
    kinds = {(attention.kind, mlp.kind) for attention, mlp in blocks}
    if len(blocks) < len(layers) or len(kinds) != 1:
        return None
    return _FusedStack(blocks, sums)


class _FusedStack:
    def __init__(
        self, blocks: Sequence[tuple[FusedAttention, FusedMlp]], sums: RankSums | None
    ) -> None:
        self._sums = sums
        # Addresses keep nothing alive.
        self._blocks = tuple(blocks)
        self._addresses = np.array(
            [(*attention.addresses, *mlp.addresses) for attention, mlp in blocks], dtype=np.int64
        )

    def __call__(
        self,
        residual_TE: Tensor,
        pool_BL2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
        progress: LayerProgress,
    ) -> Tensor:
        attention, mlp = self._blocks[0]
        check_residual(None, residual_TE, attention.width)
        if pool_BL2KPD.shape[1] != len(self._blocks):
            raise ValueError(
                f"the pool has {pool_BL2KPD.shape[1]} layers, the model {len(self._blocks)}"
            )
        kv_B2KPD = pool_BL2KPD[:, 0]
        step = attention.step(residual_TE, kv_B2KPD, rope, batch)
        operands = mlp.operands(residual_TE.shape[0])
        y_TE = torch.empty(residual_TE.shape, dtype=residual_TE.dtype)
        arguments = (
            self._addresses,
            pool_BL2KPD.stride(1) * pool_BL2KPD.element_size(),
            attention.arguments(step, residual_TE, kv_B2KPD, y_TE),
            mlp.arguments(operands, residual_TE, y_TE),
            progress.word(),
        )
        if self._sums is None:
            _run_layers(*arguments, _ALONE, 0, *_FROM_THE_START)
        else:
            self._run_with_others(self._sums, arguments)
        return y_TE

    def _run_with_others(self, sums: RankSums, arguments: _Arguments) -> None:
        block, piece = _FROM_THE_START
        while True:
            sums.operation, block, piece = _run_layers(
                *arguments, sums.region, sums.operation, block, piece
            )
            if piece == NOBODY_LATE:
                return
            sums.wait_for_others()


@jit
def _run_layers(
    addresses: Array,
    layer_bytes: int,
    attention: AttentionArguments,
    mlp: MlpArguments,
    word: tuple[int, int],
    region: tuple[int, int, int, int],
    operation: int,
    first_block: int,
    late_piece: int,
) -> tuple[int, int, int]:
    """Run the blocks from `first_block` on, which is done but for its sum if a piece of that was
    late. Returns the last operation, the block at which it stopped, and a late piece of its sum.

    A block reads x before it writes y, so all of them share one place for both.
    """
    (
        residual_at,
        norm_at,
        shape,
        qkv,
        o,
        heads,
        kv_at,
        layout,
        step,
        table,
        q_norm_at,
        k_norm_at,
        qk_norm,
        query,
        items,
        queries,
        merges,
        num_places,
        out_shape,
        normed,
        attended,
        scratch,
        y_at,
        parts,
    ) = attention
    _, mlp_norm_at, mlp_shape, gate_up, down, mlp_normed, hidden, _, mlp_parts = mlp
    count = shape[0] * shape[1]
    last_block = 2 * len(addresses) - 2
    for block in range(first_block, last_block + 1):
        layer = block // 2
        row = addresses[layer]
        if late_piece == NOBODY_LATE:
            if block % 2 == 0:
                run_attention(
                    y_at[0] if layer > 0 else 0,
                    residual_at,
                    (row[0], norm_at[1]),
                    shape,
                    at_addresses(qkv, row, 1),
                    at_addresses(o, row, 4),
                    heads,
                    (kv_at[0] + layer * layer_bytes, kv_at[1]),
                    layout,
                    step,
                    table,
                    (row[7], q_norm_at[1]),
                    (row[8], k_norm_at[1]),
                    qk_norm,
                    query,
                    items,
                    queries,
                    merges,
                    num_places,
                    (out_shape[0], out_shape[1], row[9]),
                    normed,
                    attended,
                    scratch,
                    y_at,
                    parts,
                )
                if word[0] != _NOBODY:
                    store_release(word[0], word[1] + layer + 1)
            else:
                run_mlp(
                    y_at[0],
                    residual_at,
                    (row[_MLP], mlp_norm_at[1]),
                    mlp_shape,
                    at_addresses(gate_up, row, _MLP + 1),
                    at_addresses(down, row, _MLP + 4),
                    mlp_normed,
                    hidden,
                    y_at,
                    mlp_parts,
                )
        # The caller sums up the last block, of which it may need only some rows.
        if region[1] > 1 and block < last_block:
            operation, late_piece = sum_over_ranks(region, operation, y_at, count, late_piece)
            if late_piece != NOBODY_LATE:
                return operation, block, late_piece
    return operation, last_block, NOBODY_LATE
