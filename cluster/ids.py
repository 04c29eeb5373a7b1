"""Names for the numbers that travel between the parts, so that a type checker keeps them apart."""

from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block; the same number on every rank of an engine. 0 is the null block."""

SequenceId = NewType("SequenceId", int)
"""One stream of tokens inside one engine; never reused while the engine lives."""

RequestId = NewType("RequestId", str)
"""The client's request; a request with ``n=4`` owns four sequences."""

BlockKey = NewType("BlockKey", bytes)
"""Content identity of a full block: a chained SHA-256 digest (`block_keys.py`)."""

NULL_BLOCK = BlockId(0)
"""Never allocated and never freed; padding entries of a block table point at it."""
