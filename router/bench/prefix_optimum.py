"""The least prefill that a sequence of prompts needs, whoever computes it."""

from collections.abc import Iterable

from pageray.cluster.block_keys import BlockContent, BlockHasher
from pageray.cluster.ids import BlockKey

_ROOT = BlockKey(b"optimum")


def least_prefill_tokens(prompts: Iterable[tuple[int, ...]], block_size: int) -> int:
    """Tokens computed with one endless cache for all engines, each prompt finding every full block
    of those before it. The last token of a prompt is always computed: its logits are needed."""
    hasher = BlockHasher(_ROOT, block_size)
    cached: set[BlockKey] = set()
    num_computed = 0
    for prompt in prompts:
        contents: list[BlockContent] = []
        hasher.extend(contents, prompt, "")
        num_hits = 0
        for content in contents[: (len(prompt) - 1) // block_size]:
            if content.key not in cached:
                break
            num_hits += 1
        num_computed += len(prompt) - num_hits * block_size
        cached.update(content.key for content in contents)
    return num_computed
