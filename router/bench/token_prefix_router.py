# pyright: basic
# Serve's request routers are typed by its private modules; this file is the boundary.
"""Ray Serve LLM's own prefix-aware router, given something to match on.

It looks for a `prompt` or `messages` attribute in the arguments of a call and raises without one.
Our calls carry an encoded request, so it is shown the prompt's tokens as text: one character for
each. Its tree then matches token by token, which is no worse than what it does with characters.
Nothing else of it is changed, its defaults neither: it never balances load by itself.
"""

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import (
    PrefixCacheAffinityRouter,
)
from ray.serve.request_router import PendingRequest

from pageray.router.wire import decode_request

_FIRST_SURROGATE, _NUM_SURROGATES = 0xD800, 0x800


class TokenPrefixRouter(PrefixCacheAffinityRouter):
    """Importing it needs the modules of Ray's `llm` package, but no vLLM."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """Only calls with positional arguments come here, and of those `generate` is the one."""
        return text_of(decode_request(pending_request.args[0]).prompt_token_ids)


def text_of(token_ids: tuple[int, ...]) -> str:
    """One character per token, another one for every id; no half of a surrogate pair."""
    return "".join(
        chr(token if token < _FIRST_SURROGATE else token + _NUM_SURROGATES) for token in token_ids
    )
