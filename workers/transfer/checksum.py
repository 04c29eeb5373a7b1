"""The checksum of a write: XXH3-64 over its bytes in wire order (by destination rank).

It finds damage and mix-ups, not malice. The interpreter lock is released while it runs.
"""

from collections.abc import Sequence

import xxhash

from pageray.workers.transfer.mapped_pages import ByteArray


def checksum_of(parts: Sequence[ByteArray]) -> int:
    """Of the concatenation of `parts`, 0 .. 2**64 - 1."""
    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0].data)
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.data)
    return digest.intdigest()
