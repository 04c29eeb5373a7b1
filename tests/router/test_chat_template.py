"""Templates get what transformers gives them, and cannot do more than that."""

import pytest

from pageray.cluster.errors import InvalidParameterError, ModelLoadError
from pageray.router.chat_template import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(
        USER, template_kwargs=kwargs
    )


def test_blocks_are_trimmed_and_special_tokens_named() -> None:
    source = "{{ bos_token }}\n  {% for m in messages %}\n[{{ m.content }}]\n  {% endfor %}\nend"
    assert render(source) == "<s>\n[Hi]\nend"


def test_loop_controls_and_generation_tags() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
        "{% generation %}body{% endgeneration %}"
    )
    assert render(source) == "01body"


def test_tojson_keeps_characters() -> None:
    assert render("{{ value | tojson }}", value={"a": "<é&>"}) == '{"a": "<é&>"}'


def test_the_variables_that_every_template_may_test() -> None:
    assert render("{{ tools is none }} {{ documents is none }}") == "True True"
    assert render("{{ flag }}", flag="on") == "on"


def test_template_kwargs_cannot_replace_the_messages() -> None:
    assert render("{{ messages[0].content }}", messages=[]) == "Hi"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.nothing.more }}", "no attribute"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ messages + 1 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_a_client_error(source: str, words: str) -> None:
    with pytest.raises(InvalidParameterError, match=words):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__.__mro__ }}{{ ''.__class__.mro() }}", "{{ messages.append(1) }}"],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidParameterError):
        render(source)


def test_a_template_that_does_not_compile_is_a_load_error() -> None:
    with pytest.raises(ModelLoadError, match="line 2"):
        ChatTemplate("fine\n{% if %}", {})


SIMPLE = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>{% endfor %}"


def test_continue_final_message_ends_after_its_content() -> None:
    template = ChatTemplate(SIMPLE, {})
    messages = [*USER, {"role": "assistant", "content": " Sure: "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi<end><assistant>Sure:"


def test_continue_final_message_excludes_a_generation_prompt() -> None:
    with pytest.raises(InvalidParameterError, match="exclude each other"):
        ChatTemplate(SIMPLE, {}).render(USER, continue_final_message=True)
