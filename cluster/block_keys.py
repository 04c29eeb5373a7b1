"""Block identity: chained SHA-256 over canonical bytes, equal in every process on every machine.

    root  = SHA-256("pageray-root" | model fingerprint | KV dtype | block size | layout version)
    key_i = SHA-256(key_{i-1} | salt | token ids as little-endian uint32)     (salt: i = 0 only)

A key therefore names a whole prefix, not just the tokens of its block. Strings are
length-prefixed, so that no two different inputs produce the same bytes.
"""

import hashlib
import struct
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from pageray.cluster.ids import BlockKey

LAYOUT_VERSION = 1
"""Of the page record; pages written under another version must not be hit."""

DIGEST_BITS = 256


class BlockContent(NamedTuple):
    """What a full block holds: its key, and the token ids themselves to verify a hit with."""

    key: BlockKey
    token_bytes: bytes


def root_key(model_fingerprint: str, kv_dtype: str, block_size: int) -> BlockKey:
    """The key that stands before every first block of one kind of pool."""
    digest = hashlib.sha256(b"pageray-root")
    for text in (model_fingerprint, kv_dtype):
        digest.update(_prefixed(text))
    digest.update(struct.pack("<II", block_size, LAYOUT_VERSION))
    return BlockKey(digest.digest())


class BlockHasher:
    """Turns tokens into `BlockContent`, block by block.

    `digest_bits` below 256 truncates every key: tests use it to provoke collisions, which must
    never change an answer because a hit also compares tokens and parents.
    """

    def __init__(self, root: BlockKey, block_size: int, digest_bits: int = DIGEST_BITS) -> None:
        if not 1 <= digest_bits <= DIGEST_BITS:
            raise ValueError(f"digest_bits is {digest_bits}; it must be 1..{DIGEST_BITS}.")
        self._root = root
        self._block_size = block_size
        self._digest_bits = digest_bits

    def extend(
        self, chain: list[BlockContent], token_ids: SequenceOf[int], cache_salt: str
    ) -> None:
        """Append to `chain` the content of every block that `token_ids` has filled since.

        `chain` must be a prefix of what `token_ids` and `cache_salt` give.
        """
        size = self._block_size
        for start in range(len(chain) * size, len(token_ids) - size + 1, size):
            token_bytes = struct.pack(f"<{size}I", *token_ids[start : start + size])
            digest = hashlib.sha256(chain[-1].key if chain else self._root)
            if not chain:
                digest.update(_prefixed(cache_salt))
            digest.update(token_bytes)
            chain.append(BlockContent(self._truncated(digest.digest()), token_bytes))

    def _truncated(self, digest: bytes) -> BlockKey:
        if self._digest_bits == DIGEST_BITS:
            return BlockKey(digest)
        kept = int.from_bytes(digest, "big") >> (DIGEST_BITS - self._digest_bits)
        return BlockKey(kept.to_bytes(DIGEST_BITS // 8, "big"))


def _prefixed(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<I", len(data)) + data
