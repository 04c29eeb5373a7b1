"""Which published block holds which content, inside one engine.

A publication is one block's entry under its key. Its identity is a number that is never used
again, and it names its parent publication: a chain of hits is accepted only if tokens *and*
parents agree all the way, so even colliding digests cannot pair a block with a prefix it was not
computed on.
"""

from dataclasses import dataclass
from typing import NewType

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.ids import BlockId, BlockKey

PublicationId = NewType("PublicationId", int)

NO_PARENT = PublicationId(0)
"""Parent of a sequence's first block."""


@dataclass(frozen=True, slots=True)
class Publication:
    publication_id: PublicationId
    parent_id: PublicationId
    block_id: BlockId
    content: BlockContent


class PrefixIndex:
    """Maps key -> publication and block -> publication, one to one."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, Publication] = {}
        self._by_block: dict[BlockId, Publication] = {}
        self._next_id = 1

    def __len__(self) -> int:
        return len(self._by_key)

    def of_block(self, block_id: BlockId) -> Publication | None:
        return self._by_block.get(block_id)

    def find(self, content: BlockContent, parent_id: PublicationId) -> Publication | None:
        """The publication with this content and this parent, or None."""
        found = self._by_key.get(content.key)
        if found is None or found.parent_id != parent_id or found.content != content:
            return None
        return found

    def insert(
        self, block_id: BlockId, content: BlockContent, parent_id: PublicationId
    ) -> tuple[PublicationId | None, BlockId | None]:
        """Publish a block. Returns (its publication id, a block this displaced).

        - The same content and parent is published already (two sequences computed one prefix at
          the same time): that entry's id; `block_id` itself stays unpublished.
        - The entry under this key has the same tokens but another parent: its parent was evicted
          and has been published anew, so nothing can reach the old entry. It is displaced.
        - The tokens differ: a true collision. (None, None); the caller must not publish anything
          further down this chain.
        """
        held = self._by_key.get(content.key)
        displaced: BlockId | None = None
        if held is not None:
            if held.content.token_bytes != content.token_bytes:
                return None, None
            if held.parent_id == parent_id:
                return held.publication_id, None
            displaced = held.block_id
            self.remove(displaced)
        publication = Publication(PublicationId(self._next_id), parent_id, block_id, content)
        self._next_id += 1
        self._by_key[content.key] = publication
        self._by_block[block_id] = publication
        return publication.publication_id, displaced

    def remove(self, block_id: BlockId) -> Publication:
        """Forget a published block. Raises KeyError if it is not published."""
        publication = self._by_block.pop(block_id)
        del self._by_key[publication.content.key]
        return publication

    def keys(self) -> tuple[BlockKey, ...]:
        return tuple(self._by_key)

    def check_invariants(self) -> None:
        assert len(self._by_key) == len(self._by_block), (len(self._by_key), len(self._by_block))
        for key, publication in self._by_key.items():
            assert publication.content.key == key
            assert self._by_block[publication.block_id] is publication
            assert publication.parent_id < publication.publication_id
