"""Blocks that repeat one token: a trace says which blocks are equal, not what is in them.

Block number h of a trace becomes `block_size` times the token h. A prompt of a hundred thousand
tokens then shares one small tuple per block with all others, and a block is hashed once.
"""

import struct
from collections.abc import Sequence as SequenceOf

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.ids import BlockKey


class UniformBlockHasher(BlockHasher):
    """Contents of a chain of blocks; those of uniform blocks are kept, and their `token_bytes`
    are short: (token, block size) for the whole block."""

    def __init__(self, root: BlockKey, block_size: int) -> None:
        # The short form must not look like the long form of another block.
        if block_size < 3:
            raise ValueError(f"block_size is {block_size}; a simulation needs 3 or more.")
        super().__init__(root, block_size)
        self._known: dict[tuple[BlockKey, int], BlockContent] = {}
        self._short = BlockHasher(root, 2)

    def extend(
        self, chain: list[BlockContent], token_ids: SequenceOf[int], cache_salt: str
    ) -> None:
        """As `BlockHasher.extend`."""
        size = self._block_size
        for start in range(len(chain) * size, len(token_ids) - size + 1, size):
            first = token_ids[start]
            tokens = token_ids[start : start + size]
            if first != tokens[-1] or tokens.count(first) != size:
                super().extend(chain, token_ids[: start + size], cache_salt)
                continue
            parent = chain[-1].key if chain else BlockKey(self._root + cache_salt.encode())
            content = self._known.get((parent, first))
            if content is None:
                content = self._content(chain, first, cache_salt)
                self._known[parent, first] = content
            chain.append(content)

    def _content(self, chain: list[BlockContent], token: int, cache_salt: str) -> BlockContent:
        """The key is that of a block of two tokens, (token, block size), on the same parent."""
        short = list(chain[-1:])
        tokens = (token, self._block_size)
        if short:
            # `extend` goes on behind the blocks that are there.
            self._short.extend(short, (0, 0, *tokens), cache_salt)
        else:
            self._short.extend(short, tokens, cache_salt)
        assert short[-1].token_bytes == struct.pack("<II", *tokens)
        return short[-1]
