"""One layer's attention in one call: residual += x; n = rms_norm(residual); q, k, v = n W^T; the
q/k norm, RoPE and the KV write; paged attention; y = out O^T.

What lies between the steps is float32, or rounded to bfloat16 once where a product takes that.
Python is entered once per layer and not once per operation: with one token to compute the
operations themselves take less time than their calls would.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from pageray.kernels.cpu.attention_partials import OutputShape, new_partials
from pageray.kernels.cpu.attention_plan import AttentionPlan, Query
from pageray.kernels.cpu.jit import all_threads, jit, jit_threaded, num_threads, part, prange
from pageray.kernels.cpu.matmul import multiply_in_threads, multiply_units
from pageray.kernels.cpu.memory import FLOAT_CELL, Array, Pointer, past, pointer, require_shape
from pageray.kernels.cpu.operand import Operand, Rows, cut_rows, rows_from, written
from pageray.kernels.cpu.packed_weight import Pack
from pageray.kernels.cpu.paged_attention import (
    attend_units,
    merge_part,
    planned,
    sinks_address,
)
from pageray.kernels.cpu.pages import PageLayout, page_layout, require_unscaled
from pageray.kernels.cpu.panels import Panels, addresses_of, kind_of, panels_of
from pageray.kernels.cpu.residual import check_residual
from pageray.kernels.cpu.rms_norm import add_and_norm_rows
from pageray.kernels.cpu.rope_write_kv import (
    Heads,
    Norm,
    Table,
    check_rope_step,
    move_tokens,
    norm_arguments,
)
from pageray.kernels.cpu.row_blocks import WHOLE, rows_of_block
from pageray.kernels.cpu.work_counter import fetch_add_one, new_counters
from pageray.kernels.ops import AttentionWeights, RaggedBatch, RopeStep

AttentionAddresses = tuple[int, int, int, int, int, int, int, int, int, int]
"""Of the norm, of qkv and of o (as `addresses_of` has them), of q's norm, k's norm and the sinks."""

StepPointers = tuple[Pointer, Pointer, Pointer, Pointer]
"""To positions, slots, cosines and sines, block tables."""

AttentionArguments = tuple[
    Pointer,
    Pointer,
    tuple[int, int, float],
    Panels,
    Panels,
    Heads,
    Pointer,
    PageLayout,
    StepPointers,
    Table,
    Pointer,
    Pointer,
    Norm,
    Query,
    Array,
    Array,
    Array,
    int,
    OutputShape,
    Rows,
    Rows,
    tuple[int, int],
    Pointer,
    tuple[int, int, int],
]
"""Those of `run_attention`, by its names, all but x."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionStep:
    """What all layers of a step with the same options share."""

    layout: PageLayout
    plan: AttentionPlan
    query: Query
    tables_at: Pointer
    positions_at: Pointer
    slots_at: Pointer
    angles_at: Pointer
    table: Table
    normed: Operand
    attended: Operand
    scratch: tuple[Tensor, Tensor]
    """Projection, a head per thread; both float32."""

    @property
    def scratch_addresses(self) -> tuple[int, int]:
        qkv, heads = self.scratch
        return qkv.data_ptr(), heads.data_ptr()


class FusedAttention:
    """The block on panels that `pack` makes. Raises ValueError if shapes do not fit, and for KV
    scales other than 1."""

    def __init__(self, weights: AttentionWeights, pack: Pack) -> None:
        options, head_dim = weights.options, weights.head_dim
        require_unscaled(options.k_scale, options.v_scale)
        self._norm_E, self._eps = weights.norm_E, weights.eps
        self._options = options
        self._qkv, self._o = (
            pack(weights.qkv_OE, weights.qkv_bias_O),
            pack(weights.o_EO, weights.o_bias_E),
        )
        self._panels = panels_of(self._qkv), panels_of(self._o)
        self._head_dim = head_dim
        self._num_heads = self._o.num_inputs // head_dim
        self._heads: Heads = (self._num_heads, self._qkv.num_outputs, head_dim)
        self._qk_norm = weights.qk_norm
        self._norm_args = norm_arguments(weights.qk_norm, weights.norm_E)
        if weights.qk_norm is not None:
            require_shape("q_norm", weights.qk_norm.q_norm_D, head_dim)
            require_shape("k_norm", weights.qk_norm.k_norm_D, head_dim)
        self._out_shape: OutputShape = (
            self._num_heads,
            head_dim,
            sinks_address(options.sinks_H, self._num_heads),
        )

    @property
    def width(self) -> int:
        """E."""
        return self._qkv.num_inputs

    @property
    def kind(self) -> tuple[object, ...]:
        """Equal for layers that differ in nothing but the numbers of their weights."""
        options, qk_norm = self._options, self._qk_norm
        return (
            *map(kind_of, self._panels),
            self._heads,
            (options.scale, options.window, options.softcap, options.sinks_H is not None),
            (self._norm_E.dtype, self._eps),
            (None, 0.0) if qk_norm is None else (qk_norm.q_norm_D.dtype, qk_norm.eps),
        )

    @property
    def addresses(self) -> AttentionAddresses:
        q_norm_at, k_norm_at, _ = self._norm_args
        return (
            self._norm_E.data_ptr(),
            *addresses_of(self._panels[0]),
            *addresses_of(self._panels[1]),
            q_norm_at[0],
            k_norm_at[0],
            self._out_shape[2],
        )

    def __call__(
        self,
        x_TE: Tensor | None,
        residual_TE: Tensor,
        kv_B2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
    ) -> Tensor:
        check_residual(x_TE, residual_TE, self._qkv.num_inputs)
        step = self.step(residual_TE, kv_B2KPD, rope, batch)
        y_TE = torch.empty(residual_TE.shape, dtype=residual_TE.dtype)
        x_address = 0 if x_TE is None else x_TE.data_ptr()
        run_attention(x_address, *self.arguments(step, residual_TE, kv_B2KPD, y_TE))
        return y_TE

    def arguments(
        self, step: AttentionStep, residual_TE: Tensor, kv_B2KPD: Tensor, y_TE: Tensor
    ) -> AttentionArguments:
        """What `run_attention` takes after the address of x; the caller keeps all of it alive."""
        num_rows, width = residual_TE.shape
        return (
            pointer(residual_TE),
            pointer(self._norm_E),
            (num_rows, width, self._eps),
            *self._panels,
            self._heads,
            pointer(kv_B2KPD),
            step.layout,
            (step.positions_at, step.slots_at, step.angles_at, step.tables_at),
            step.table,
            *self._norm_args,
            step.query,
            step.plan.items,
            step.plan.queries,
            step.plan.merges,
            step.plan.num_places,
            self._out_shape,
            step.normed.rows,
            step.attended.rows,
            step.scratch_addresses,
            pointer(y_TE),
            (num_threads(residual_TE.numel()), all_threads(), self._rows_of_block(num_rows)),
        )

    def _rows_of_block(self, num_rows: int) -> int:
        """For what comes before the attention, which needs the keys of all rows."""
        bytes_per_row = self._qkv.operand_bytes + 4 * self._qkv.num_outputs
        return rows_of_block(num_rows, bytes_per_row, all_threads())

    def step(
        self, residual_TE: Tensor, kv_B2KPD: Tensor, rope: RopeStep, batch: RaggedBatch
    ) -> AttentionStep:
        """Checked and worked out by the first layer of a step, and kept with the batch."""
        options = self._options
        key = (
            "attention block",
            self._heads,
            (self._qkv.num_parts, self._o.num_parts),
            options.window,
            kv_B2KPD.shape,
            kv_B2KPD.stride(),
        )
        step = batch.memo.get(key)
        if step is None:
            step = self._new_step(residual_TE, kv_B2KPD, rope, batch)
            batch.memo[key] = step
        return cast("AttentionStep", step)

    def _new_step(
        self, residual_TE: Tensor, kv_B2KPD: Tensor, rope: RopeStep, batch: RaggedBatch
    ) -> AttentionStep:
        layout = page_layout(kv_B2KPD)
        num_rows = residual_TE.shape[0]
        num_kv_heads, head_dim = kv_B2KPD.shape[2], kv_B2KPD.shape[4]
        num_all_heads = self._num_heads + 2 * num_kv_heads
        require_shape("kv", kv_B2KPD, *kv_B2KPD.shape[:4], self._head_dim)
        if self._qkv.num_outputs != num_all_heads * head_dim:
            raise ValueError(
                f"qkv has {self._qkv.num_outputs} outputs; {self._num_heads} query heads and "
                f"{num_kv_heads} KV heads of {head_dim} need {num_all_heads * head_dim}"
            )
        check_rope_step(rope, kv_B2KPD, num_rows)
        group = self._num_heads // num_kv_heads
        options = self._options
        block = self._rows_of_block(num_rows)
        return AttentionStep(
            layout=layout,
            plan=planned(batch, kv_B2KPD, group, options.window),
            query=(
                self._qkv.num_outputs,
                head_dim,
                batch.block_tables_SN.shape[1],
                group,
                options.scale,
                options.window,
                options.softcap,
            ),
            tables_at=pointer(batch.block_tables_SN),
            positions_at=pointer(rope.positions_T),
            slots_at=pointer(rope.slot_mapping_T),
            angles_at=pointer(rope.cos_sin_LD),
            table=(rope.cos_sin_LD.stride(0), rope.cos_sin_LD.shape[1] // 2),
            normed=Operand(num_rows if block == WHOLE else all_threads() * block, self._qkv),
            attended=Operand(num_rows, self._o),
            scratch=(
                torch.empty(num_rows, self._qkv.num_outputs),
                torch.empty(all_threads(), head_dim),
            ),
        )


@jit
def _project_blocks(
    x_address: int,
    residual_at: Pointer,
    norm_at: Pointer,
    shape: tuple[int, int, float],
    qkv: Panels,
    heads: Heads,
    kv_at: Pointer,
    layout: PageLayout,
    positions_at: Pointer,
    slots_at: Pointer,
    angles_at: Pointer,
    table: Table,
    q_norm_at: Pointer,
    k_norm_at: Pointer,
    qk_norm: Norm,
    normed: Rows,
    scratch: tuple[int, int],
    rows_of_block: int,
    blocks: Array,
    units: Array,
) -> None:
    """One thread's share of all that comes before the attention: take blocks off the first counter
    until there are none; the second is for the product of a block."""
    num_rows, width, eps = shape
    _, _, normed_at, normed_stride, _ = normed
    qkv_at, buffer_at = scratch
    start = fetch_add_one(blocks) * rows_of_block
    while start < num_rows:
        stop = min(num_rows, start + rows_of_block)
        block_at = past(residual_at, start * width)
        block_address = x_address
        if x_address != 0:
            block_address += block_at[0] - residual_at[0]
        add_and_norm_rows(
            block_address, block_at, norm_at, written(normed), width, eps, 0, stop - start
        )
        cut_rows(normed, width, 0, stop - start)
        units[0] = 0
        out_at = past((qkv_at, FLOAT_CELL), start * qkv[4])
        multiply_units(normed_at, normed_stride, stop - start, qkv, out_at, False, 1, units)
        move_tokens(
            (qkv_at, FLOAT_CELL),
            heads,
            kv_at,
            layout,
            positions_at,
            slots_at,
            angles_at,
            table,
            q_norm_at,
            k_norm_at,
            qk_norm,
            (1.0, 1.0),
            (buffer_at, FLOAT_CELL),
            start,
            stop,
        )
        start = fetch_add_one(blocks) * rows_of_block


@jit_threaded
def run_attention(
    x_address: int,
    residual_at: Pointer,
    norm_at: Pointer,
    shape: tuple[int, int, float],
    qkv: Panels,
    o: Panels,
    heads: Heads,
    kv_at: Pointer,
    layout: PageLayout,
    step: StepPointers,
    table: Table,
    q_norm_at: Pointer,
    k_norm_at: Pointer,
    qk_norm: Norm,
    query: Query,
    items: Array,
    queries: Array,
    merges: Array,
    num_places: int,
    out_shape: OutputShape,
    normed: Rows,
    attended: Rows,
    scratch: tuple[int, int],
    y_at: Pointer,
    parts: tuple[int, int, int],
) -> None:
    num_rows, width, eps = shape
    num_row_parts, num_parts, rows_of_block = parts
    _, _, normed_at, normed_stride, _ = normed
    _, _, attended_at, attended_stride, num_attended_cuts = attended
    qkv_at, buffers_at = scratch
    positions_at, slots_at, angles_at, tables_at = step
    head_dim = layout[5]
    counters = new_counters(2 + num_parts)
    # A loop ends when every thread has finished, so each may read all that the one before wrote.
    if rows_of_block != WHOLE:
        for index in prange(num_parts):
            _project_blocks(
                x_address,
                residual_at,
                norm_at,
                shape,
                qkv,
                heads,
                kv_at,
                layout,
                positions_at,
                slots_at,
                angles_at,
                table,
                q_norm_at,
                k_norm_at,
                qk_norm,
                rows_from(normed, width, index * rows_of_block),
                (qkv_at, buffers_at + index * head_dim * 4),
                rows_of_block,
                counters[0],
                counters[2 + index],
            )
    else:
        if num_row_parts == 1:
            add_and_norm_rows(
                x_address, residual_at, norm_at, written(normed), width, eps, 0, num_rows
            )
            cut_rows(normed, width, 0, num_rows)
        else:
            for index in prange(num_row_parts):
                start, stop = part(num_rows, num_row_parts, index)
                add_and_norm_rows(
                    x_address, residual_at, norm_at, written(normed), width, eps, start, stop
                )
                cut_rows(normed, width, start, stop)
        multiply_in_threads(
            normed_at, normed_stride, num_rows, qkv, (qkv_at, FLOAT_CELL), False, num_parts
        )
        if num_row_parts == 1:
            move_tokens(
                (qkv_at, FLOAT_CELL),
                heads,
                kv_at,
                layout,
                positions_at,
                slots_at,
                angles_at,
                table,
                q_norm_at,
                k_norm_at,
                qk_norm,
                (1.0, 1.0),
                (buffers_at, FLOAT_CELL),
                0,
                num_rows,
            )
        else:
            for index in prange(num_row_parts):
                start, stop = part(num_rows, num_row_parts, index)
                move_tokens(
                    (qkv_at, FLOAT_CELL),
                    heads,
                    kv_at,
                    layout,
                    positions_at,
                    slots_at,
                    angles_at,
                    table,
                    q_norm_at,
                    k_norm_at,
                    qk_norm,
                    (1.0, 1.0),
                    (buffers_at + index * head_dim * 4, FLOAT_CELL),
                    start,
                    stop,
                )
    partials = new_partials(num_places, out_shape[0], head_dim)
    for _ in prange(num_parts):
        attend_units(
            (qkv_at, FLOAT_CELL),
            query,
            kv_at,
            layout,
            tables_at,
            written(attended),
            out_shape,
            items,
            queries,
            partials,
            counters[1],
        )
    if len(merges) > 0:
        for index in prange(num_parts):
            merge_part(merges, index, num_parts, partials, written(attended), out_shape)
    if num_attended_cuts > 0:
        width = out_shape[0] * head_dim
        for index in prange(num_parts):
            start, stop = part(num_rows, num_parts, index)
            cut_rows(attended, width, start, stop)
    multiply_in_threads(attended_at, attended_stride, num_rows, o, y_at, False, num_parts)
