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

EngineId = NewType("EngineId", str)
"""One engine of an application: the id of the Serve replica that owns it."""

Epoch = NewType("Epoch", int)
"""Taken anew at every start of an engine and always growing; what was said under an older one is void."""

TransferId = NewType("TransferId", int)
"""One transfer of pages; unique for its destination engine while that lives."""

NULL_BLOCK = BlockId(0)
"""Never allocated and never freed; padding entries of a block table point at it."""
