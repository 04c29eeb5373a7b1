"""The operations that the model layers call, and the shapes they agree on.

Shape legend, used as suffixes throughout `kernels/`:
T tokens of the step, S sequences, H query heads of this rank, K KV heads of this rank,
A = H + 2K heads of the fused projection, L positions of a table, D head dim, E hidden size, I intermediate size, B blocks of the pool, P token slots in a block
(block_size), N block-table width, R rows to sample, V vocabulary.

Three packages implement the same signatures: `reference/` (plain torch, the definition of
correct), `cpu/` (Numba) and `gpu/` (Triton). `dispatch.py` hands out a filled `Ops`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class RaggedBatch:
    """Which queries of a step belong to which sequence, and where that sequence's pages are.

    Sequence s owns query rows `query_starts[s]:query_starts[s+1]`; they are its last tokens, so
    query row i of a sequence with L = kv_lens[s] and n queries stands at position L - n + i and
    sees key positions 0..L - n + i. Token j of the sequence lives in token slot j % P of block
    `block_tables[s, j // P]`. Entries of a block table past the last used block are never read.
    """

    query_starts_S1: Tensor
    """int32 [S + 1], ascending, first 0, last T."""
    kv_lens_S: Tensor
    """int32 [S]: tokens of the sequence in the cache after this step's KV write; >= 1."""
    block_tables_SN: Tensor
    """int32 [S, N], contiguous rows."""
    max_query_len: int
    max_kv_len: int
    """At least the largest of kv_lens_S; a captured graph serves all batches up to its own."""
    memo: dict[object, object] = field(
        default_factory=dict[object, object], init=False, compare=False, repr=False
    )
    """What an implementation has worked out from the above, for the other layers of the step."""


@dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """How one layer's attention turns products into weights. For a query of head h and a key,

        s = (q . k) * scale * k_scale            k as stored: the true key is k * k_scale
        s = softcap * tanh(s / softcap)          if softcap > 0
        s = -inf                                 where the key is masked
        out = v_scale * sum_j e^(s_j) v_j / (sum_j e^(s_j) + e^(sinks_H[h]))

    with the last term of the denominator only if there are sinks. The sink is compared with scaled
    and capped scores; it takes weight and has no value. Raises ValueError for numbers out of range.
    """

    scale: float
    window: int = 0
    """A query at position p sees keys p - window + 1 .. p; 0: all up to p."""
    softcap: float = 0.0
    """Bounds the scores to -softcap .. softcap; 0: no bound."""
    sinks_H: Tensor | None = None
    """float32 [H], contiguous."""
    k_scale: float = 1.0
    """What one unit of a stored K is worth; `Ops.rope_write_kv` divides by it."""
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.window < 0:
            raise ValueError(f"window is {self.window}; it must be positive, or 0 for none")
        # Written so that a NaN is refused too.
        if not 0.0 <= self.softcap < math.inf:
            raise ValueError(f"softcap is {self.softcap}; it must be positive, or 0 for none")
        check_kv_scales(self.k_scale, self.v_scale)


def check_kv_scales(k_scale: float, v_scale: float) -> None:
    """Raise ValueError unless stored keys and values can be divided by their scales."""
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if not 0.0 < scale < math.inf:
            raise ValueError(f"{name} is {scale}; it must be positive and finite")


@dataclass(frozen=True, kw_only=True)
class RopeStep:
    """Where the tokens of a step stand in their sequences, and where their K and V go."""

    positions_T: Tensor
    """int64 [T], each below the length of the table."""
    cos_sin_LD: Tensor
    """float32 [L, R], R even and <= D: row p holds the cosines of position p's R / 2 angles, then
    the sines."""
    slot_mapping_T: Tensor
    """int64 [T]: token t goes to slot s % P of block s // P, s = slot_mapping[t]; -1 skips it."""


@dataclass(frozen=True, kw_only=True)
class QkNorm:
    """RMSNorm over the head dim of every query and key head, before RoPE, as in Qwen3."""

    q_norm_D: Tensor
    k_norm_D: Tensor
    eps: float


@dataclass(frozen=True, kw_only=True)
class KvScales:
    """What K and V are divided by on their way into one layer of the pool; > 0, 1 is off.

    Whoever reads the pool multiplies by them again. They make the most of a pool of 8-bit floats.
    """

    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        check_kv_scales(self.k_scale, self.v_scale)


@dataclass(frozen=True, kw_only=True)
class SamplingRows:
    """Per-row sampling settings, one row per token to sample.

    A row with temperature 0 is greedy. top_k 0 keeps all; top_p 1 keeps all; min_p 0 keeps all.
    """

    temperature_R: Tensor
    """float32 [R], >= 0."""
    top_k_R: Tensor
    """int32 [R], >= 0."""
    top_p_R: Tensor
    """float32 [R], in (0, 1]."""
    min_p_R: Tensor
    """float32 [R], in [0, 1]."""
    uniform_R: Tensor
    """float64 [R], in [0, 1): one draw per row, from `draw_uniform`."""


@dataclass(frozen=True, kw_only=True)
class PenaltyRows:
    """Token histories of the rows that carry penalties, concatenated.

    Row r's history is `history_N[starts_R1[r]:starts_R1[r+1]]`, the prompt first; its first
    `prompt_lens_R[r]` tokens are the prompt, the rest is output.
    """

    rows_R: Tensor
    """int64 [R]: which rows of the logits these are."""
    history_N: Tensor
    """int64 [N] token ids."""
    starts_R1: Tensor
    """int64 [R + 1]."""
    prompt_lens_R: Tensor
    """int64 [R]."""
    repetition_R: Tensor
    """float32 [R], > 0; 1 is off. Applies to tokens of prompt and output."""
    presence_R: Tensor
    """float32 [R]; 0 is off. Applies to tokens of the output."""
    frequency_R: Tensor
    """float32 [R]; 0 is off. Applies per occurrence in the output."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AttentionWeights:
    """One layer's attention, a rank's share of it."""

    norm_E: Tensor
    eps: float
    qkv_OE: Tensor
    """O = (H + 2 K) D rows: q heads, then k heads, then v heads."""
    qkv_bias_O: Tensor | None
    qk_norm: QkNorm | None
    o_EO: Tensor
    """O = H D columns."""
    o_bias_E: Tensor | None
    head_dim: int
    options: AttentionOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class MlpWeights:
    """One layer's SwiGLU MLP, a rank's share of it."""

    norm_E: Tensor
    eps: float
    gate_up_2IE: Tensor
    gate_up_bias_2I: Tensor | None
    down_EI: Tensor
    down_bias_E: Tensor | None


class Linear(Protocol):
    """y_TO = x_TE @ weight_OE.T + bias_O, with the weight already in the form it is used in."""

    def __call__(self, x_TE: Tensor) -> Tensor: ...


class AttentionBlock(Protocol):
    """residual += x; y = attention(rms_norm(residual)), the layer's K and V written to the pool.

    x_TE is the output of the block before, or None when there was none; y_TE, a new tensor, that
    of this one, a rank's summand of it. Both have the dtype of residual_TE, which is contiguous.
    """

    def __call__(
        self,
        x_TE: Tensor | None,
        residual_TE: Tensor,
        kv_B2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
    ) -> Tensor: ...


class MlpBlock(Protocol):
    """residual += x; y = mlp(rms_norm(residual)). Tensors as `AttentionBlock` has them."""

    def __call__(self, x_TE: Tensor, residual_TE: Tensor) -> Tensor: ...


class LayerProgress(Protocol):
    """Whoever wants to know how much of a step is in the pool: transfers follow it."""

    def __call__(self, num_layers: int) -> None:
        """The K and V of the first `num_layers` layers are written."""
        ...

    def word(self) -> tuple[int, int]:
        """(address of an aligned int64, what it holds while no layer is written), for code that
        cannot call Python: it stores that number plus `num_layers` instead, releasing what it wrote
        before. Address 0: nobody looks."""
        ...


class NoProgress:
    """The `LayerProgress` of a model that nobody follows."""

    def __call__(self, num_layers: int) -> None:
        pass

    def word(self) -> tuple[int, int]:
        return 0, 0


class RankSums(Protocol):
    """Sums over the ranks of a model, as code makes them that cannot call Python: in memory that all
    ranks share. `kernels/cpu/shared_reduce.py` has the protocol."""

    operation: int
    """The number of the last one that this rank has contributed to; whoever makes one counts on."""

    @property
    def region(self) -> tuple[int, int, int, int]:
        """Address of the memory, number of ranks, bytes of a slot, this rank."""
        ...

    def wait_for_others(self) -> None:
        """Return once all ranks have contributed to the last operation, however long that takes;
        raises an error if one is gone."""
        ...


class LayerStack(Protocol):
    """Decoder layers in a row, up to the MLP of the last one, which is not computed.

    residual_TE, contiguous, is changed in place; y_TE is what the last layer's attention gives its
    MLP, not summed over the ranks yet. Layer l keeps its K and V in pool_BL2KPD[:, l].
    """

    def __call__(
        self,
        residual_TE: Tensor,
        pool_BL2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
        progress: LayerProgress,
    ) -> Tensor: ...


LayerBlocks = tuple[AttentionBlock, MlpBlock]


def never_stacked(layers: Sequence[LayerBlocks], sums: RankSums | None) -> LayerStack | None:
    """The answer of a backend that runs block after block."""
    del layers, sums
    return None


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation. Every tensor lives on the same device.

    Unless said otherwise activations are float32, bfloat16 or float16 and reductions run in
    float32. The pool is of one of these dtypes, or float8_e4m3fn: `reference/` takes it, `gpu/` on
    NVIDIA devices of compute capability 8.9 or later, `cpu/` does not. No operation reads a token slot at or past a sequence's kv_len, nor a block outside
    its block table: those may hold anything, NaN included.
    """

    name: str

    pack_linear: Callable[[Tensor, Tensor | None], Linear]
    """(weight_OE, bias_O or None) -> Linear. Takes the weight over; the caller drops its own."""

    pack_attention: Callable[[AttentionWeights], AttentionBlock]
    """Takes the weights over. Equals rms_norm, or add_rms_norm, a linear, rope_write_kv,
    paged_attention and a linear, but may round less between them."""

    pack_mlp: Callable[[MlpWeights], MlpBlock]
    """Takes the weights over. Equals add_rms_norm, a linear, silu_mul and a linear, but may round
    less between them."""

    stack_layers: Callable[[Sequence[LayerBlocks], RankSums | None], LayerStack | None]
    """All layers of a model as one operation, which gives the bits that they give one by one, with
    sums over the ranks between blocks if there are any; None if the backend does not join these.
    They come from this `Ops`."""

    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x_TE, weight_E, eps) -> y_TE = x / sqrt(mean(x^2) + eps) * weight. New tensor.
    The last dimension is normalised; leading dimensions are free (q/k norm passes [T, H, D])."""

    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    """(x_TE, residual_TE, weight_E, eps) -> y_TE. residual += x in place, y = rms_norm(residual).
    The sum is rounded to the residual's dtype before it is normalised."""

    rope_write_kv: Callable[[Tensor, Tensor, RopeStep, QkNorm | None, KvScales], Tensor]
    """(qkv_TAD, kv_B2KPD, step, norm, scales) -> q_THD, a view of the first H heads of qkv.

    qkv's heads are H of queries, K of keys, K of values; K is that of kv_B2KPD, one layer of the
    pool: a strided view with contiguous [P, D] tiles, plane 0 K, plane 1 V. q is normalised and
    rotated in place; k is normalised and rotated, v is not, and both are divided by their scale
    and written to their slots in the pool's dtype. k and v in qkv stay as they were.

    Rotation is in half-split (NeoX) pairs: dims (i, i + R/2) of the first R turn by the angle of
    position and i, R = the width of cos_sin_LD; dims past R pass through. The reference rounds to
    qkv's dtype after the norm and again after RoPE; the fast paths stay in float32 in between and
    round once, q to its own dtype, k to the pool's. A pool of float8_e4m3fn saturates at +-448; NaN
    stays NaN. The CPU has no such pool and raises ValueError for it."""

    silu_mul: Callable[[Tensor], Tensor]
    """(gate_up_T2I) -> y_TI = silu(gate) * up; gate is the first half of a row."""

    copy_blocks: Callable[[Tensor, Tensor], None]
    """(pool: first dim B, any trailing shape; pairs_C2 int64 (source, destination)). Copies
    whole records. No block is both a source and a destination, and no destination repeats."""

    paged_attention: Callable[[Tensor, Tensor, RaggedBatch, AttentionOptions], Tensor]
    """(q_THD, kv_B2KPD, batch, options) -> out_THD, causal attention as `AttentionOptions` says.
    Query head h reads KV head h // (H / K). Any mix of prefill chunks and decodes in one call."""

    apply_penalties: Callable[[Tensor, PenaltyRows], None]
    """(logits_RV float32, penalties) in place. Repetition first (positive logits are divided,
    negative multiplied; Keskar et al. 2019, arXiv:1909.05858), then logit -= presence + count *
    frequency for tokens of the output (OpenAI API)."""

    draw_uniform: Callable[[Tensor, Tensor, Tensor], Tensor]
    """(seed_R int64, sequence_index_R int64, position_R int64) -> float64 [R] in [0, 1), on the
    53-bit grid. Philox4x32-10 (Salmon et al., SC 2011), key = the seed's two halves, counter =
    (position low, position high, sequence index, 0); u = the top 53 bits of words 0 and 1."""

    sample: Callable[[Tensor, SamplingRows], Tensor]
    """(logits_RV float32, rows) -> int64 [R]. Greedy rows: the largest logit, lowest id among
    equals. Else, with z = logit / temperature: keep tokens with z >= the top_k-th largest z
    (ties stay); of those, with probabilities renormalised, keep the smallest set of largest
    probabilities whose mass reaches top_p (tokens equal to the last one kept stay); of those,
    keep p >= min_p * max p. Then the inverse transform in id order: the first kept token whose
    running mass exceeds uniform * total mass. At least one token is always kept. Does not
    modify the logits."""
