"""Steps of sequences that nobody asked for: to compile what steps need, and to measure them."""

from collections.abc import Iterator

from pageray.cluster.ids import NULL_BLOCK, SequenceId
from pageray.cluster.memory_plan import blocks_for_tokens
from pageray.cluster.sampling_params import SamplingParams
from pageray.cluster.step import NewSequence, SampleRequest, ScheduledChunk, StepPlan


def made_up_steps(num_tokens: int, block_size: int, max_model_len: int) -> Iterator[StepPlan]:
    """One prefill of about `num_tokens`, one decode, and a plan that drops the sequences again.

    All their tokens share the null block's slots, which nobody else reads.
    """
    length = max(1, min(block_size, max_model_len - 1))
    ids = [SequenceId(-1 - number) for number in range(max(1, num_tokens // length))]
    sampling = SamplingParams(top_p=0.5, top_k=2, repetition_penalty=1.1)
    num_blocks = blocks_for_tokens(length + 1, block_size)
    added = tuple(
        NewSequence(
            sequence_id=sequence_id,
            index=0,
            seed=0,
            token_ids=(0,) * (length + 1),
            num_prompt_tokens=length,
            block_ids=(NULL_BLOCK,) * num_blocks,
            sampling=sampling,
        )
        for sequence_id in ids
    )
    prefill = tuple(ScheduledChunk(sequence_id, 0, length) for sequence_id in ids)
    yield StepPlan(step_id=0, added=added, chunks=prefill)
    decode = tuple(ScheduledChunk(sequence_id, length, 1) for sequence_id in ids)
    samples = tuple(SampleRequest(sequence_id, row) for row, sequence_id in enumerate(ids))
    yield StepPlan(step_id=0, chunks=decode, samples=samples)
    yield StepPlan(step_id=0, dropped=tuple(ids))
