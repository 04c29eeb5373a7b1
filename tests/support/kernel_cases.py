"""Random inputs for kernel tests, and how close two results have to be."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pageray.kernels.ops import AttentionOptions, RaggedBatch, SamplingRows

TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Equal up to the rounding of the dtype; NaN where NaN is expected."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class PagedShape:
    """What a paged attention case looks like: (tokens in the cache, queries) per sequence."""

    sequences: Sequence[tuple[int, int]]
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    kv_dtype: torch.dtype | None = None
    """None: that of the queries."""
    k_scale: float = 1.0
    v_scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PagedCase:
    """A pool of the real layout [B, L, 2, K, P, D], whose layer 1 holds the case's pages."""

    q_THD: Tensor
    pool: Tensor
    batch: RaggedBatch
    options: AttentionOptions

    @property
    def layer(self) -> Tensor:
        """kv_B2KPD, as the kernels take it."""
        return self.pool[:, 1]


def paged_case(
    shape: PagedShape,
    *,
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    garbage: float = 0.0,
) -> PagedCase:
    """Pages scattered at random over the pool; every slot no sequence owns holds `garbage`."""
    size = shape.block_size
    counts = [(kv_len + size - 1) // size for kv_len, _ in shape.sequences]
    num_blocks = sum(counts) + 3
    pool = torch.full(
        (num_blocks, 2, 2, shape.num_kv_heads, size, shape.head_dim),
        garbage,
        dtype=shape.kv_dtype or dtype,
    )
    # Block 0 belongs to nobody: it is what a table entry left unread looks like to a kernel.
    free_blocks = 1 + torch.randperm(num_blocks - 1, generator=generator).int()
    # Entries past the used blocks name a block that belongs to nobody.
    tables_SN = torch.full((len(counts), max(counts) + 1), int(free_blocks[-1]), dtype=torch.int32)
    for s, (kv_len, _) in enumerate(shape.sequences):
        first = sum(counts[:s])
        tables_SN[s, : counts[s]] = free_blocks[first : first + counts[s]]
        for token in range(kv_len):
            values = torch.randn(2, shape.num_kv_heads, shape.head_dim, generator=generator)
            pool[int(tables_SN[s, token // size]), 1, :, :, token % size] = values.to(pool.dtype)
    num_queries = [queries for _, queries in shape.sequences]
    q_THD = torch.randn(sum(num_queries), shape.num_heads, shape.head_dim, generator=generator).to(
        dtype
    )
    sinks_H = torch.randn(shape.num_heads, generator=generator)
    starts = torch.tensor([0, *num_queries]).cumsum(0).int()
    kv_lens_S = torch.tensor([kv_len for kv_len, _ in shape.sequences], dtype=torch.int32)
    return PagedCase(
        q_THD=q_THD.to(device),
        pool=pool.to(device),
        batch=RaggedBatch(
            query_starts_S1=starts.to(device),
            kv_lens_S=kv_lens_S.to(device),
            block_tables_SN=tables_SN.to(device),
            max_query_len=max(num_queries),
            max_kv_len=int(kv_lens_S.max()),
        ),
        options=AttentionOptions(
            scale=shape.head_dim**-0.5,
            window=shape.window,
            softcap=shape.softcap,
            sinks_H=sinks_H.to(device) if shape.has_sinks else None,
            k_scale=shape.k_scale,
            v_scale=shape.v_scale,
        ),
    )


@dataclass(frozen=True, kw_only=True)
class SamplingSettings:
    """One row's settings; the defaults keep everything."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def sampling_rows(uniform_R: Tensor, settings: SamplingSettings) -> SamplingRows:
    """The same settings for every row; one row per element of `uniform_R`, on its device."""

    def fill(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full(uniform_R.shape, value, dtype=dtype, device=uniform_R.device)

    return SamplingRows(
        temperature_R=fill(settings.temperature, torch.float32),
        top_k_R=fill(settings.top_k, torch.int32),
        top_p_R=fill(settings.top_p, torch.float32),
        min_p_R=fill(settings.min_p, torch.float32),
        uniform_R=uniform_R.double(),
    )
