"""Text to token ids and back, from a model folder, without torch or transformers.

Only `tokenizer.json` and `tokenizer_config.json` are read. The ids are those of transformers'
`AutoTokenizer`, whose import alone takes seconds of a replica's start-up.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tokenizers

from pageray.cluster.errors import InvalidParameterError, ModelLoadError

_SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class TokenizerConfig(msgspec.Struct, frozen=True):
    """The parts of `tokenizer_config.json` that serving needs."""

    special_tokens: dict[str, str]
    """Name (`bos_token`, ...) to text, for those the model has."""
    chat_template: str | None
    """Jinja source of the default chat template."""


class Tokenizer:
    """A model's tokenizer. Immutable, so it may be used from several threads.

    Token ids that came from outside must lie in `0 .. vocab_size - 1`; `check_token_ids` says so
    with a 400 instead of the library's exception.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
        # A tokenizer.json may carry the settings of somebody's training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = config
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )

    @classmethod
    def from_folder(cls, folder: Path) -> "Tokenizer":
        """Raises `ModelLoadError` naming the file that is missing or broken."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{path} does not exist. Give a folder with a tokenizer.json as "
                "model_source or tokenizer_source."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ModelLoadError(f"{path} is not a tokenizer: {error}") from error
        return cls(backend, load_tokenizer_config(folder))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included. A model's logits may be wider."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises `InvalidParameterError` for text that is not Unicode."""
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError) as error:
            raise InvalidParameterError(
                "The text holds a lone surrogate, which no encoding can represent. "
                "Send valid Unicode."
            ) from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary writes it, or "" for an id without an entry."""
        return self._backend.id_to_token(token_id) or ""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def check_token_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Raise `InvalidParameterError` for the first id outside the vocabulary."""
        size = self.vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < size:
                raise InvalidParameterError(
                    f"{param} holds token id {token_id}; ids must be between 0 and {size - 1}.",
                    param=param,
                )


def load_tokenizer_config(folder: Path) -> TokenizerConfig:
    """Read special tokens and chat template. A missing file means none of either."""
    path = folder / "tokenizer_config.json"
    raw = _read_object(path) if path.is_file() else {}
    special = {name: text for name in _SPECIAL_TOKEN_NAMES if (text := _token_text(raw.get(name)))}
    template_file = folder / "chat_template.jinja"
    if template_file.is_file():
        return TokenizerConfig(special, template_file.read_text(encoding="utf-8"))
    return TokenizerConfig(special, _default_template(raw.get("chat_template"), path))


def _read_object(path: Path) -> dict[str, object]:
    try:
        return msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, object])
    except (ValueError, msgspec.ValidationError) as error:
        raise ModelLoadError(f"{path} is not a JSON object: {error}") from error


def _token_text(value: object) -> str | None:
    """A special token is written as its text or as an object with `content`."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        content = msgspec.convert(value, dict[str, object]).get("content")
        return content if isinstance(content, str) else None
    return None


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


def _default_template(value: object, path: Path) -> str | None:
    """One template, or a list of named ones of which "default" is meant."""
    if value is None or isinstance(value, str):
        return value
    try:
        named = msgspec.convert(value, list[_NamedTemplate])
    except msgspec.ValidationError as error:
        raise ModelLoadError(f"{path}: chat_template is not understood: {error}") from error
    for entry in named:
        if entry.name == "default":
            return entry.template
    return None
