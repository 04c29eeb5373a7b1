"""The door of an engine: what can never be served is refused here, with the numbers."""

import hashlib
from dataclasses import dataclass

from pageray.cluster.errors import ContextLengthError, InvalidParameterError
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.memory_plan import worst_case_blocks


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What one engine can hold, found out when it started."""

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int
    max_num_seqs: int
    eos_token_ids: tuple[int, ...]

    @property
    def capacity_tokens(self) -> int:
        """Token slots of the whole pool."""
        return self.num_blocks * self.block_size


def resolve_max_tokens(request: GenerateRequest, limits: EngineLimits) -> int:
    """Check a request against the limits; the number of output tokens it may produce.

    Raises `InvalidParameterError` or `ContextLengthError`. A `max_tokens` of None becomes as many
    as fit; a stated one that does not fit is an error, for silently producing less would be a
    wrong answer.
    """
    sampling = request.sampling
    sampling.validate(limits.vocab_size)
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidParameterError("The prompt has no tokens; give at least one.", param="prompt")
    out_of_range = [t for t in request.prompt_token_ids if not 0 <= t < limits.vocab_size]
    if out_of_range:
        raise InvalidParameterError(
            f"Prompt token id {out_of_range[0]} is outside the vocabulary "
            f"(0 to {limits.vocab_size - 1}).",
            param="prompt",
        )
    if sampling.n > limits.max_num_seqs:
        raise InvalidParameterError(
            f"n is {sampling.n}, but this engine runs at most {limits.max_num_seqs} sequences "
            "at once (max_num_seqs).",
            param="n",
        )
    room = limits.max_model_len - num_prompt
    if room < 1 or (sampling.max_tokens or 1) > room:
        raise ContextLengthError(
            f"The prompt has {num_prompt} tokens and max_tokens is "
            f"{'not set' if sampling.max_tokens is None else sampling.max_tokens}, but prompt and "
            f"output together are limited to {limits.max_model_len} tokens (max_model_len).",
            param="max_tokens" if room >= 1 else "prompt",
        )
    fitting = _max_tokens_in_pool(num_prompt, sampling.n, limits)
    wanted = sampling.max_tokens
    _check_resumed(request, limits)
    if fitting < (wanted or 1):
        needed = worst_case_blocks(num_prompt, wanted or 1, sampling.n, limits.block_size)
        raise ContextLengthError(
            f"The request needs up to {needed} KV blocks ({needed * limits.block_size} token "
            f"slots: {num_prompt} prompt tokens, n = {sampling.n}, max_tokens = {wanted}), but the "
            f"whole pool has {limits.num_blocks} ({limits.capacity_tokens} token slots). Shorten "
            "the prompt, lower max_tokens or n, or serve with a larger KV pool.",
            param="max_tokens",
        )
    return min(room, fitting) if wanted is None else wanted


def _check_resumed(request: GenerateRequest, limits: EngineLimits) -> None:
    if not request.resumed:
        return
    n, limit = request.sampling.n, request.sampling.max_tokens
    if len(request.resumed) != n:
        raise InvalidParameterError(
            f"resumed has {len(request.resumed)} entries for n = {n}.", param="resumed"
        )
    if all(each.is_finished for each in request.resumed):
        raise InvalidParameterError("Every resumed sequence has finished.", param="resumed")
    for each in request.resumed:
        if limit is not None and not each.is_finished and len(each.output_token_ids) >= limit:
            raise InvalidParameterError(
                f"A resumed sequence has {len(each.output_token_ids)} tokens already; "
                f"max_tokens is {limit}.",
                param="resumed",
            )
        if not all(0 <= token_id < limits.vocab_size for token_id in each.output_token_ids):
            raise InvalidParameterError(
                f"A resumed token id is outside the vocabulary (0 to {limits.vocab_size - 1}).",
                param="resumed",
            )


def request_seed(request: GenerateRequest, engine_seed: int) -> int:
    """The request's own seed, or one derived from the engine's seed and the request id.

    A resubmitted or migrated request keeps its id, and so its draws, on any engine.
    """
    if request.sampling.seed is not None:
        return request.sampling.seed
    digest = hashlib.sha256(f"{engine_seed}:{request.request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _max_tokens_in_pool(num_prompt: int, num_sequences: int, limits: EngineLimits) -> int:
    """Largest max_tokens whose worst case fits the pool; 0 if none does.

    Solves `worst_case_blocks(...) <= num_blocks` for max_tokens.
    """
    shared = num_prompt // limits.block_size
    blocks_each = shared + (limits.num_blocks - shared) // num_sequences
    if limits.num_blocks < shared:
        return 0
    return max(0, blocks_each * limits.block_size + 1 - num_prompt)
