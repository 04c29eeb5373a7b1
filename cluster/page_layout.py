"""How an engine's pages are laid out over its ranks, and which bytes go where between two engines.

A page is `[num_layers, 2 (K, V), kv_heads_of_the_rank, block_size, head_dim]`, contiguous. Two
engines of the same model may cut the KV heads differently (TP 3 feeds TP 2): pages then travel as
slices of heads.
"""

import msgspec


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """One engine's pool on all its ranks. Everything but `shards` is equal where pages are shared."""

    num_layers: int
    block_size: int
    head_dim: int
    element_bytes: int
    shards: tuple[tuple[int, int], ...]
    """By rank: its KV heads, (start, end) as numbered in the whole model. Ranks may overlap when
    KV heads are replicated."""

    @property
    def head_bytes(self) -> int:
        """One KV head's K (or V) of one layer of one block: the smallest contiguous run."""
        return self.block_size * self.head_dim * self.element_bytes

    def page_bytes(self, rank: int) -> int:
        start, end = self.shards[rank]
        return self.num_layers * 2 * (end - start) * self.head_bytes


class HeadSlice(msgspec.Struct, frozen=True, kw_only=True):
    """Heads that one source rank has and one destination rank needs.

    `source_head` and `destination_head` count within each rank's own page.
    """

    source_rank: int
    destination_rank: int
    source_head: int
    destination_head: int
    num_heads: int


def head_slices(source: PoolLayout, destination: PoolLayout) -> tuple[HeadSlice, ...]:
    """The slices that fill every destination rank's pages, each KV head once.

    In order of destination rank, then head. A head that several source ranks hold is taken from
    the first of them. Raises ValueError when the layouts are not of one model (layers, block
    size, head size, element size) or a head is missing at the source.
    """
    for name in ("num_layers", "block_size", "head_dim", "element_bytes"):
        ours, theirs = getattr(source, name), getattr(destination, name)
        if ours != theirs:
            raise ValueError(f"{name} is {ours} at the source and {theirs} at the destination.")
    slices: list[HeadSlice] = []
    for destination_rank, (start, end) in enumerate(destination.shards):
        head = start
        while head < end:
            source_rank, source_start, source_end = _holder_of(head, source)
            until = min(end, source_end)
            slices.append(
                HeadSlice(
                    source_rank=source_rank,
                    destination_rank=destination_rank,
                    source_head=head - source_start,
                    destination_head=head - start,
                    num_heads=until - head,
                )
            )
            head = until
    return tuple(slices)


def _holder_of(head: int, layout: PoolLayout) -> tuple[int, int, int]:
    for rank, (start, end) in enumerate(layout.shards):
        if start <= head < end:
            return rank, start, end
    raise ValueError(f"no rank of the source holds KV head {head}: {layout.shards}.")
