"""Which fields of a request are known, and what becomes of those that are not served.

A field is served, harmless (accepted and without effect), or refused unless it has a value that
asks for nothing. Anything else is refused by name, as OpenAI's own API does: a misspelt option
that is silently dropped is worse than an error.
"""

import difflib
from collections.abc import Collection, Mapping

from pageray.cluster.errors import InvalidParameterError

HARMLESS_FIELDS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "safety_identifier",
        "service_tier",
        "spaces_between_special_tokens",
        "store",
        "user",
        "verbosity",
    }
)
"""About billing, storage and the like, or hints that may be ignored."""

NO_OP_VALUES: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1, 1.0),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "prediction": (),
    "priority": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "web_search_options": (),
}
"""Fields that are not served, with the values (besides null) that ask for nothing."""


def keep_served_fields(data: Mapping[str, object], served: Collection[str]) -> dict[str, object]:
    """The served fields of `data`. Raises `InvalidParameterError` naming the first field that is
    unknown (with the nearest known one) or asks for something not served."""
    kept: dict[str, object] = {}
    for name, value in data.items():
        if name in served:
            kept[name] = value
        elif name in NO_OP_VALUES:
            if value is not None and value not in NO_OP_VALUES[name]:
                raise InvalidParameterError(
                    f"{name} is not supported here. Leave it out.", param=name
                )
        elif name not in HARMLESS_FIELDS:
            near = difflib.get_close_matches(name, served, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise InvalidParameterError(
                f"Unrecognized request argument: {name[:100]!r}.{hint}", param=name[:100]
            )
    return kept
