"""How many blocks fit: page sizes in bytes, and what a request can need at most."""

from dataclasses import dataclass

from pageray.cluster.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PageLayout:
    """Shape of one page: the record of one block on one rank.

    `[num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`, contiguous, in elements of
    `element_bytes` bytes.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    element_bytes: int

    @property
    def page_bytes(self) -> int:
        return (
            self.num_layers
            * 2
            * self.num_kv_heads
            * self.block_size
            * self.head_dim
            * self.element_bytes
        )


def blocks_that_fit(budget_bytes: int, layout: PageLayout) -> int:
    """Usable blocks in `budget_bytes` of one rank, the null block's page taken off.

    Raises `ConfigError` naming the bytes needed when not even one usable block fits.
    """
    num_blocks = budget_bytes // layout.page_bytes - 1
    if num_blocks < 1:
        raise ConfigError(
            f"The KV pool has {budget_bytes:,} bytes, but one block of {layout.block_size} tokens "
            f"needs {layout.page_bytes:,} bytes and the null block as many again: give it at least "
            f"{2 * layout.page_bytes:,} bytes (kv_cache_memory_bytes), or lower block_size."
        )
    return num_blocks


def blocks_for_tokens(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def worst_case_blocks(
    num_prompt_tokens: int, max_tokens: int, num_sequences: int, block_size: int
) -> int:
    """Blocks that a request holds at most: full prompt blocks are shared by its sequences, the
    rest is each one's own. The last output token is never computed, hence the - 1."""
    shared = num_prompt_tokens // block_size
    longest = blocks_for_tokens(num_prompt_tokens + max_tokens - 1, block_size)
    return shared + num_sequences * (longest - shared)
