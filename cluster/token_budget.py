"""The tokens of one step, and how they are shared between long and short work."""


class TokenBudget:
    """Tokens left in a step, and the part of them that long prompts may take.

    While shorter work is at hand, sequences with more than half a step's tokens still to compute
    share at most half of the step: a huge prompt then cannot hold up the first tokens of short
    ones, however many huge prompts there are.
    """

    def __init__(self, num_tokens: int, *, has_short_work: bool, min_chunk: int) -> None:
        self.left = num_tokens
        self._min_chunk = min_chunk
        self._long_from = long_from(num_tokens)
        self._long_left = num_tokens // 2 if has_short_work else num_tokens

    def chunk_for(self, num_remaining: int, num_reserved: int) -> int:
        """How many of a sequence's remaining tokens this step may compute.

        `num_reserved` tokens are kept for others. A long prompt gets at least `min_chunk` of
        what is left, so that the second of two long prompts advances too.
        """
        chunk = min(num_remaining, max(0, self.left - num_reserved))
        if num_remaining > self._long_from:
            chunk = min(chunk, max(self._long_left, self._min_chunk))
        return chunk

    def spend(self, num_tokens: int, num_remaining: int) -> None:
        """Take `num_tokens` for a sequence that had `num_remaining` to compute; a negative
        number gives them back."""
        self.left -= num_tokens
        if num_remaining > self._long_from:
            self._long_left -= num_tokens


def long_from(num_budget_tokens: int) -> int:
    """A sequence with more remaining tokens than this counts as long."""
    return num_budget_tokens // 2
