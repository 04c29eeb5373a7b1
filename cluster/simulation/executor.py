"""Ranks that compute nothing: they say how long a step takes, and which tokens it draws."""

from pageray.cluster.ids import SequenceId
from pageray.cluster.simulation.cost_model import CostModel
from pageray.cluster.step import StepPlan, StepResult

OUTPUT_TOKENS = 1 << 24
"""Output tokens are this and above; prompts stay below, so no output equals another's prompt."""
VOCAB_SIZE = 2 * OUTPUT_TOKENS


def output_token(seed: int, position: int) -> int:
    """The only right token at a position of a request's output, on whatever engine."""
    return OUTPUT_TOKENS + (seed * 7919 + position) % OUTPUT_TOKENS


class SimulatedRanks:
    """Follows plans as ranks do: new sequences in full, dropped ones forgotten."""

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._known: dict[SequenceId, tuple[int, int]] = {}
        """(seed, prompt tokens)."""
        self.num_prompt_tokens = 0
        """Computed so far, whether for the first time or again."""

    def execute(self, plan: StepPlan) -> tuple[StepResult, float]:
        """What the step gives, and its seconds."""
        for sequence_id in plan.dropped:
            del self._known[sequence_id]
        for new in plan.added:
            self._known[new.sequence_id] = (new.seed, new.num_prompt_tokens)
        seconds = self._cost.step_s
        for chunk in plan.chunks:
            seconds += self._cost.chunk_s(chunk.start, chunk.num_tokens)
            num_prompt = self._known[chunk.sequence_id][1]
            if chunk.start < num_prompt:
                self.num_prompt_tokens += min(chunk.num_tokens, num_prompt - chunk.start)
        tokens: list[int] = []
        for sample in plan.samples:
            chunk = plan.chunks[sample.chunk]
            seed, num_prompt = self._known[sample.sequence_id]
            tokens.append(output_token(seed, chunk.start + chunk.num_tokens - num_prompt))
        return StepResult(step_id=plan.step_id, token_ids=tuple(tokens)), seconds
