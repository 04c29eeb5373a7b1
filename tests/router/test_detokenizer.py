"""Streamed pieces join to the full decode, whatever the tokens."""

import hypothesis.strategies as st
import tokenizers
from hypothesis import given, settings
from tokenizers import decoders, models

from pageray.router.detokenizer import Detokenizer
from pageray.router.tokenizer import Tokenizer, TokenizerConfig

UNICODE = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
SEQUENCES = ["👩‍👩‍👧‍👦", "नमस्ते दुनिया", "a\u0301e\u0308", "𝕌𝕟𝕚", "\ufffd literal \ufffd", "🇩🇪🎉" * 3]


def pieces_of(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@settings(deadline=None, max_examples=150)
@given(text=UNICODE | st.sampled_from(SEQUENCES))
def test_text_comes_back_and_no_piece_is_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(Detokenizer(tokenizer, skip_special_tokens=False), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    # The vocabulary lacks some rare bytes; what it cannot spell is not complete either.
    if "\ufffd" not in tokenizer.decode(ids, skip_special_tokens=False):
        assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None, max_examples=150)
@given(ids=st.lists(st.integers(0, 49151), max_size=40), skip=st.booleans())
def test_any_ids_join_to_the_full_decode(tokenizer: Tokenizer, ids: list[int], skip: bool) -> None:
    pieces = pieces_of(Detokenizer(tokenizer, skip_special_tokens=skip), ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=60)
@given(data=st.binary(max_size=120))
def test_any_bytes_join_to_the_full_decode(tokenizer: Tokenizer, data: bytes) -> None:
    known = byte_tokens(tokenizer)
    ids = [known[value] for value in data if value in known]
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_long_run_of_bad_bytes_does_not_pile_up(tokenizer: Tokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    bad = byte_tokens(tokenizer)[0x80]
    shown = "".join(detokenizer.push(bad) for _ in range(200))
    assert 160 < len(shown) <= 200
    assert shown + detokenizer.flush() == "\ufffd" * 200


@settings(deadline=None, max_examples=60)
@given(text=UNICODE, cut=st.integers(0, 60))
def test_priming_continues_where_another_stopped(tokenizer: Tokenizer, text: str, cut: int) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    first = Detokenizer(tokenizer)
    shown = "".join(first.push(token_id) for token_id in ids[:cut])
    second = Detokenizer(tokenizer)
    second.prime(ids[:cut])
    rest = "".join(pieces_of(second, ids[cut:]))
    assert shown + rest == tokenizer.decode(ids)


def byte_tokens(tokenizer: Tokenizer) -> dict[int, int]:
    """Byte to the token that is just this byte, for those that have one: the alphabet of
    byte-level BPE (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    characters.update({chr(256 + position): byte for position, byte in enumerate(others)})
    names = ((tokenizer.token_name(token_id), token_id) for token_id in range(1000))
    return {characters[name]: token_id for name, token_id in names if name in characters}


def metaspace_tokenizer() -> Tokenizer:
    """The decoder of Llama 2 and Mistral: a text's first space is dropped, bytes fall back."""
    tokens = ["▁Hello", "▁world", "▁", "!", *(f"<0x{value:02X}>" for value in range(256))]
    backend = tokenizers.Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [], byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(backend, TokenizerConfig({}, None))


def fallback_ids(text: str) -> list[int]:
    return [4 + byte for byte in text.encode()]


@settings(deadline=None, max_examples=100)
@given(parts=st.lists(st.sampled_from([[0], [1], [2], [3]]) | UNICODE.map(fallback_ids)))
def test_metaspace_and_byte_fallback(parts: list[list[int]]) -> None:
    tokenizer = metaspace_tokenizer()
    ids = [token_id for part in parts for token_id in part]
    pieces = pieces_of(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == tokenizer.decode(ids)


def test_after_a_prompt_the_first_space_stays() -> None:
    tokenizer = metaspace_tokenizer()
    assert pieces_of(Detokenizer(tokenizer), [1, 3]) == ["world", "!", ""]
    assert pieces_of(Detokenizer(tokenizer, context_ids=[0]), [1, 3]) == [" world", "!", ""]
