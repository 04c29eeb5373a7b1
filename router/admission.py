"""What the ingress refuses before it bothers an engine. The engine checks the same again."""

from pageray.cluster.errors import ContextLengthError, InvalidParameterError
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.sampling_params import MAX_SEQUENCES_PER_REQUEST
from pageray.router.wire import ModelFacts


def check_request(request: GenerateRequest, facts: ModelFacts) -> None:
    """Raise `InvalidParameterError` or `ContextLengthError` with the numbers and what to do."""
    request.sampling.validate(facts.vocab_size)
    if not request.prompt_token_ids:
        raise InvalidParameterError(
            "The prompt has no tokens; at least one is needed.", param="prompt"
        )
    _check_token_ids(request.prompt_token_ids, facts.vocab_size)
    _check_length(len(request.prompt_token_ids), request.sampling.max_tokens, facts)


def check_num_sequences(num_prompts: int, n: int) -> None:
    """Raise `InvalidParameterError` when a request asks for more sequences than it may."""
    if num_prompts * n > MAX_SEQUENCES_PER_REQUEST:
        raise InvalidParameterError(
            f"{num_prompts} prompts with n={n} make {num_prompts * n} sequences; "
            f"at most {MAX_SEQUENCES_PER_REQUEST} fit in one request.",
            param="n",
        )


def _check_token_ids(token_ids: tuple[int, ...], vocab_size: int) -> None:
    worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
    if not 0 <= worst < vocab_size:
        raise InvalidParameterError(
            f"The prompt holds token id {worst}; ids must be between 0 and {vocab_size - 1}.",
            param="prompt",
        )


def _check_length(num_prompt_tokens: int, max_tokens: int | None, facts: ModelFacts) -> None:
    # Without max_tokens the engine fills the context, but one token must fit.
    wanted = num_prompt_tokens + (1 if max_tokens is None else max_tokens)
    if wanted > facts.max_model_len:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens and max_tokens is "
            f"{'not set' if max_tokens is None else max_tokens}, together at least {wanted}; "
            f"this model's context holds {facts.max_model_len}. "
            "Shorten the prompt or lower max_tokens.",
            param="max_tokens" if num_prompt_tokens < facts.max_model_len else "prompt",
        )
    if num_prompt_tokens + 1 > facts.capacity_tokens:
        raise ContextLengthError(
            f"The prompt has {num_prompt_tokens} tokens; this server's KV memory holds "
            f"{facts.capacity_tokens} in all. Shorten the prompt.",
            param="prompt",
        )
