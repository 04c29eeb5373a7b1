"""Calls of paged attention: a mixed batch, decodes, prefills; and torch's own beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from pageray.kernels.ops import AttentionOptions, Ops, RaggedBatch
from pageray.router.bench.gpu_check.kernel_call import KernelCall, Setting, Tensors, num_bytes
from pageray.router.bench.gpu_check.layer_cases import BLOCK_SIZE, randn

Lengths = Sequence[tuple[int, int]]
"""(tokens in the cache, queries) of each sequence."""


@dataclass(frozen=True)
class _Batch:
    """What `RaggedBatch` holds beside tensors, and the options of the call."""

    max_query_len: int
    max_kv_len: int
    options: AttentionOptions


def mixed_attention(setting: Setting) -> KernelCall:
    """A quarter of the tokens are decodes of up to 1000 tokens, the rest two prefills: one of a
    whole prompt, one of a chunk with as many tokens before it."""
    num_decodes = max(1, setting.num_tokens // 4)
    num_rest = max(2, setting.num_tokens - num_decodes)
    whole, chunk = num_rest // 2, num_rest - num_rest // 2
    decodes = [(1 + 37 * number % 1000, 1) for number in range(num_decodes)]
    return attention_call(setting, [*decodes, (whole, whole), (2 * chunk, chunk)])


def attention_call(setting: Setting, lengths: Lengths, pool_layers: int = 2) -> KernelCall:
    """Pages scattered over a pool of `pool_layers` layers, the last of which is read."""
    shape = setting.shape
    counts = [-(-kv_len // BLOCK_SIZE) for kv_len, _ in lengths]
    record = (pool_layers, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    queries = [num_queries for _, num_queries in lengths]
    tensors = {
        "q": randn(setting, sum(queries), shape.num_heads, shape.head_dim),
        "pool": randn(setting, sum(counts), *record),
        "tables": _tables(setting, counts),
        "kv_lens": _int32(setting, [kv_len for kv_len, _ in lengths]),
        "starts": _int32(setting, [sum(queries[:s]) for s in range(len(queries) + 1)]),
    }
    batch = _Batch(
        max_query_len=max(queries),
        max_kv_len=max(kv_len for kv_len, _ in lengths),
        options=AttentionOptions(scale=shape.head_dim**-0.5, window=shape.window),
    )
    visible = [visible_keys(kv_len, count, shape.window) for kv_len, count in lengths]
    kv_bytes = 2 * shape.num_kv_heads * shape.head_dim * setting.dtype.itemsize
    return KernelCall(
        tensors=tensors,
        call=lambda ops, given: (_attend(ops, given, batch),),
        num_bytes=num_bytes(*[tensors["q"]] * 2) + kv_bytes * sum(read for read, _ in visible),
        num_flops=4 * shape.num_heads * shape.head_dim * sum(pairs for _, pairs in visible),
    )


def torch_attention_call(setting: Setting, kv_len: int, num_queries: int) -> KernelCall:
    """torch's scaled_dot_product_attention on `setting.num_tokens` equal sequences whose keys
    and values are contiguous. `num_queries` is 1 or all of `kv_len`."""
    shape, batch = setting.shape, setting.num_tokens
    kv_size = (batch, shape.num_kv_heads, kv_len, shape.head_dim)
    tensors = {
        "q": randn(setting, batch, shape.num_heads, num_queries, shape.head_dim),
        "k": randn(setting, *kv_size),
        "v": randn(setting, *kv_size),
    }

    def call(ops: Ops, given: Tensors) -> tuple[Tensor, ...]:
        out = functional.scaled_dot_product_attention(
            given["q"],
            given["k"],
            given["v"],
            is_causal=num_queries > 1,
            enable_gqa=shape.num_heads != shape.num_kv_heads,
        )
        return (out,)

    q, k = tensors["q"], tensors["k"]
    return KernelCall(tensors=tensors, call=call, num_bytes=num_bytes(q, q, k, k))


def visible_keys(kv_len: int, num_queries: int, window: int) -> tuple[int, int]:
    """(keys that some query of a sequence sees, pairs of a query and a key it sees)."""
    positions = range(kv_len - num_queries, kv_len)
    if window == 0:
        return kv_len, sum(position + 1 for position in positions)
    first = max(0, kv_len - num_queries - window + 1)
    return kv_len - first, sum(min(window, position + 1) for position in positions)


def _attend(ops: Ops, given: Tensors, batch: _Batch) -> Tensor:
    ragged = RaggedBatch(
        query_starts_S1=given["starts"],
        kv_lens_S=given["kv_lens"],
        block_tables_SN=given["tables"],
        max_query_len=batch.max_query_len,
        max_kv_len=batch.max_kv_len,
    )
    kv_B2KPD = given["pool"][:, -1]
    return ops.paged_attention(given["q"], kv_B2KPD, ragged, batch.options)


def _tables(setting: Setting, counts: Sequence[int]) -> Tensor:
    """int32 [S, N]: the blocks 0 .. sum(counts) - 1 in random order."""
    blocks = torch.randperm(sum(counts), device=setting.device, generator=setting.generator)
    tables_SN = torch.zeros((len(counts), max(counts)), dtype=torch.int32, device=setting.device)
    for row, part in enumerate(torch.split(blocks.int(), list(counts))):
        tables_SN[row, : len(part)] = part
    return tables_SN


def _int32(setting: Setting, values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=setting.device)
