"""The ids are those of transformers, for text and for chats."""

import json
from pathlib import Path
from typing import cast

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pageray.cluster.errors import InvalidParameterError, ModelLoadError
from pageray.router.chat_template import ChatTemplate
from pageray.router.served_model import load_sampling_defaults
from pageray.router.tokenizer import Tokenizer, load_tokenizer_config
from pageray.router.tokenizer_source import resolve_tokenizer_folder

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "line\nbreaks\r\n\ttabs",
    "naïve café — “quotes” 北京 🎉👩‍👩‍👧‍👦 \u202eRTL",
    "1234567890 3.14159",
    "<|im_start|>user\nspecial<|im_end|>",
    "\x00\x01 control",
]

CHATS = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 北京?"},
        {"role": "assistant", "content": "A city."},
        {"role": "user", "content": "  Spaces  \n"},
    ],
]


@pytest.fixture(scope="module")
def theirs(model_folder: Path) -> PreTrainedTokenizerBase:
    return cast(PreTrainedTokenizerBase, AutoTokenizer.from_pretrained(model_folder))


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encodes_like_transformers(
    tokenizer: Tokenizer,
    theirs: PreTrainedTokenizerBase,
    text: str,
    add_special_tokens: bool,
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_ids_are_the_templates_ids(
    tokenizer: Tokenizer,
    theirs: PreTrainedTokenizerBase,
    messages: list[dict[str, str]],
    add_generation_prompt: bool,
) -> None:
    source = tokenizer.config.chat_template
    assert source is not None
    template = ChatTemplate(source, tokenizer.config.special_tokens)
    text = template.render(messages, add_generation_prompt=add_generation_prompt)
    expected = theirs.apply_chat_template(
        messages,
        tokenize=True,
        add_generation_prompt=add_generation_prompt,
        return_dict=False,
    )
    assert tokenizer.encode(text, add_special_tokens=False) == expected


def test_vocab_size_and_special_tokens(
    tokenizer: Tokenizer, theirs: PreTrainedTokenizerBase
) -> None:
    assert tokenizer.vocab_size == len(theirs)
    for token_id in theirs.all_special_ids:
        assert tokenizer.is_special(token_id)
    assert not tokenizer.is_special(tokenizer.encode("hello")[0])


def test_a_lone_surrogate_is_the_clients_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidParameterError, match="surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("token_id", [-1, 49152, 2**70])
def test_ids_outside_the_vocabulary_are_named(tokenizer: Tokenizer, token_id: int) -> None:
    with pytest.raises(InvalidParameterError, match=str(token_id)):
        tokenizer.check_token_ids([5, token_id], param="tokens")


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelLoadError, match="is not a tokenizer"):
        Tokenizer.from_folder(tmp_path)


def test_special_tokens_and_templates_come_in_several_forms(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": {"content": "<s>", "special": True},
                "eos_token": "</s>",
                "pad_token": None,
                "chat_template": [
                    {"name": "tool_use", "template": "tools"},
                    {"name": "default", "template": "plain"},
                ],
            }
        )
    )
    config = load_tokenizer_config(tmp_path)
    assert config.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert config.chat_template == "plain"
    (tmp_path / "chat_template.jinja").write_text("from a file")
    assert load_tokenizer_config(tmp_path).chat_template == "from a file"


def test_generation_config_gives_sampling_defaults(tmp_path: Path) -> None:
    assert load_sampling_defaults(tmp_path).temperature == 1.0
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"temperature": 0.6, "top_p": None, "top_k": 20, "eos_token_id": [1, 2]})
    )
    defaults = load_sampling_defaults(tmp_path)
    assert (defaults.temperature, defaults.top_p, defaults.top_k) == (0.6, 1.0, 20)


def test_a_fetched_model_is_found_where_fetching_puts_it(model_folder: Path) -> None:
    assert resolve_tokenizer_folder("SmolLM2-135M-Instruct") == model_folder
    assert resolve_tokenizer_folder("smollm2-135m") == model_folder
    assert resolve_tokenizer_folder(str(model_folder)) == model_folder
