"""Which sequences of a batch begin with the same blocks, and so can read them together."""

import numpy as np

from pageray.kernels.cpu.jit import jit
from pageray.kernels.cpu.memory import Array, Pointer, flat

MIN_SHARED_TOKENS = 64
"""A shorter common beginning is read by each alone: merging costs more than it saves."""


@jit
def find_shared_prefixes(
    starts_at: Pointer,
    kv_lens_at: Pointer,
    tables_at: Pointer,
    shape: tuple[int, int, int],
    window: int,
) -> tuple[Array, Array]:
    """(leader, shared tokens) of every sequence, both int64 [S].

    `shape` is (S, width of the block tables, block size). Sequences with the same leader, the
    first of them, share their first `shared` tokens, a multiple of the block size and the same for
    all of them; -1 and 0 for a sequence that shares nothing. Only single queries without a window
    take part.
    """
    starts, kv_lens, tables = flat(starts_at, 0), flat(kv_lens_at, 0), flat(tables_at, 0)
    num_sequences, width, block_size = shape
    leaders = np.full(num_sequences, -1, np.int64)
    shared = np.zeros(num_sequences, np.int64)
    heads = np.empty(num_sequences, np.int64)
    num_heads = 0
    for s in range(num_sequences):
        if window > 0 or starts[s + 1] - starts[s] != 1:
            continue
        for h in range(num_heads):
            head = heads[h]
            # The last token stays each sequence's own.
            limit = min(kv_lens[head] - 1, kv_lens[s] - 1) // block_size
            common = 0
            while common < limit and tables[head * width + common] == tables[s * width + common]:
                common += 1
            tokens, before = common * block_size, shared[head]
            # A member that would more than halve what the others share begins its own group.
            if tokens >= MIN_SHARED_TOKENS and 2 * tokens >= before:
                leaders[head], leaders[s] = head, head
                shared[head] = min(before, tokens) if before > 0 else tokens
                break
        if leaders[s] < 0:
            heads[num_heads] = s
            num_heads += 1
    for s in range(num_sequences):
        if leaders[s] >= 0:
            shared[s] = shared[leaders[s]]
    return leaders, shared
