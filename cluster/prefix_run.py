"""The longest published run of blocks that starts a chain."""

from collections.abc import Iterable

from pageray.cluster.block_keys import BlockContent
from pageray.cluster.block_pool import BlockPool
from pageray.cluster.prefix_index import NO_PARENT, Publication


def find_run(pool: BlockPool, contents: Iterable[BlockContent]) -> list[Publication]:
    """Tokens and parents are compared block by block. Takes no reference."""
    run: list[Publication] = []
    parent_id = NO_PARENT
    for content in contents:
        hit = pool.find(content, parent_id)
        if hit is None:
            break
        run.append(hit)
        parent_id = hit.publication_id
    return run
