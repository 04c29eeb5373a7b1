"""Every decoder layer of a model that is on one rank, in one call.

With a few tokens to compute, entering Python for every block takes a quarter of a step. What
differs from layer to layer is where its weights and its pages are: a row of addresses. All else is
that of the first layer, so layers of different kinds do not stack.
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
from pageray.kernels.cpu.shared_words import store_release
from pageray.kernels.ops import LayerBlocks, LayerProgress, LayerStack, RaggedBatch, RopeStep

_NOBODY = 0
_MLP = 10
"""The first column of `FusedMlp.addresses`; those of the attention come before."""


def stack_layers(layers: Sequence[LayerBlocks]) -> LayerStack | None:
    """None if the layers differ in anything but the numbers of their weights."""
    blocks = [
        (attention, mlp)
        for attention, mlp in layers
        if isinstance(attention, FusedAttention) and isinstance(mlp, FusedMlp)
    ]
    kinds = {(attention.kind, mlp.kind) for attention, mlp in blocks}
    if len(blocks) < len(layers) or len(kinds) != 1:
        return None
    return _FusedStack(blocks)


class _FusedStack:
    def __init__(self, blocks: Sequence[tuple[FusedAttention, FusedMlp]]) -> None:
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
        _run_layers(
            self._addresses,
            pool_BL2KPD.stride(1) * pool_BL2KPD.element_size(),
            attention.arguments(step, residual_TE, kv_B2KPD, y_TE),
            mlp.arguments(operands, residual_TE, y_TE),
            progress.word(),
        )
        return y_TE


@jit
def _run_layers(
    addresses: Array,
    layer_bytes: int,
    attention: AttentionArguments,
    mlp: MlpArguments,
    word: tuple[int, int],
) -> None:
    """A block reads x before it writes y, so all of them share one place for both."""
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
    num_layers = len(addresses)
    for layer in range(num_layers):
        row = addresses[layer]
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
        if layer + 1 < num_layers:
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
