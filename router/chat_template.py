"""Chat messages to prompt text: a model's Jinja template, rendered in a sandbox.

Names, options and globals are those that transformers gives to templates, since templates are
written against them (transformers, `apply_chat_template`).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import cast

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from pageray.cluster.errors import InvalidParameterError, ModelLoadError

Message = Mapping[str, object]
"""`role`, `content` and, where given, `name`: what a template sees of one message."""


class ChatTemplate:
    """One compiled template and the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises `ModelLoadError` when `source` is not valid Jinja."""
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(
                f"The chat template does not compile: line {error.lineno}: {error.message}"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> str:
        """The prompt text, special tokens spelt out: encode it without adding any again.

        With `continue_final_message` the text ends right after the last message's content, so
        that the model goes on with it. Raises `InvalidParameterError` with the template's own
        words when the template refuses the messages.
        """
        if continue_final_message and add_generation_prompt:
            raise InvalidParameterError(
                "continue_final_message and add_generation_prompt exclude each other: "
                "set add_generation_prompt to false.",
                param="continue_final_message",
            )
        variables: dict[str, object] = {
            **self._special_tokens,
            **(template_kwargs or {}),
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
        }
        variables.setdefault("tools", None)
        variables.setdefault("documents", None)
        try:
            text = self._template.render(variables)
        except jinja2.TemplateError as error:
            raise InvalidParameterError(
                f"The chat template refuses the messages: {error.message or error}",
                param="messages",
            ) from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            # Template code runs on the client's messages: its type errors are the client's.
            raise InvalidParameterError(
                f"The chat template fails on the messages: {type(error).__name__}: {error}",
                param="messages",
            ) from error
        if continue_final_message:
            return _cut_after_final_content(text, messages)
        return text


def _cut_after_final_content(text: str, messages: Sequence[Message]) -> str:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str) or not content.strip():
        raise InvalidParameterError(
            "continue_final_message needs a last message with text content.",
            param="continue_final_message",
        )
    # Templates often strip the content; look for it as given first.
    for wanted in (content, content.strip()):
        start = text.rfind(wanted)
        if start >= 0:
            return text[: start + len(wanted)]
    raise InvalidParameterError(
        "continue_final_message: the chat template changes the last message's content, "
        "so the place to go on from cannot be found.",
        param="continue_final_message",
    )


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    # Jinja's annotation of `globals` knows only its own functions.
    names = cast(dict[str, object], environment.globals)
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}..{% endgeneration %}` marks assistant text for training; serving prints
    the body and forgets the mark."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
