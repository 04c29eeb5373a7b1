"""Token ids to text, one token at a time.

Context: bytes of one character may be spread over several tokens, and some decoders treat the
first token of a text differently. So a window of tokens is decoded twice, without and with the
new tokens, and the difference is the new text; text that ends in U+FFFD is withheld, since the
next token may complete the character.

    ids:     ... | prefix .. read | read .. end |
                   already shown    not yet shown
"""

from collections.abc import Sequence

from pageray.router.tokenizer import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_CONTEXT_TOKENS = 6
_MAX_UTF8_BYTES = 4
_MAX_PENDING_TOKENS = 16


class Detokenizer:
    """Text of one growing sequence.

    The pieces returned by `push` and one final `flush` join to `Tokenizer.decode` of all pushed
    ids (for byte-level vocabularies: of any ids; for byte-fallback ones: of ids that form valid
    UTF-8). A character is returned only when all of its bytes are there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        context_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        """`context_ids`: tokens before the first one pushed (a prompt's end); their text is not
        returned, but a decoder that treats the start of a text specially sees that it is none."""
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._read = 0
        self._shown = ""
        """Text of `_ids[:_read]`."""
        self._set_context(context_ids)

    def push(self, token_id: int) -> str:
        """Take the next token; returns the text that has become certain, often "" or one word."""
        if self._skip_special_tokens and self._tokenizer.is_special(token_id):
            # It has no text, and keeping it would let the window grow.
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.endswith(_REPLACEMENT):
            return self._advance(len(self._ids), text)
        if len(self._ids) - self._read > _MAX_PENDING_TOKENS:
            return self._give_up_on_bytes(text)
        return ""

    def flush(self) -> str:
        """The withheld rest; call once, after the last token."""
        text = self._decode(self._ids)
        return self._advance(len(self._ids), text)

    def prime(self, token_ids: Sequence[int]) -> None:
        """Take tokens whose text has been delivered already (resuming a sequence elsewhere)."""
        for token_id in token_ids:
            self.push(token_id)

    def _set_context(self, context_ids: Sequence[int]) -> None:
        context = [
            token_id
            for token_id in context_ids[-_CONTEXT_TOKENS:]
            if not (self._skip_special_tokens and self._tokenizer.is_special(token_id))
        ]
        text = self._decode(context) if context else ""
        if text and _REPLACEMENT not in text:
            self._ids, self._read, self._shown = context, len(context), text

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _advance(self, end: int, text: str) -> str:
        """Show up to `end`, where `text` is the text of `_ids[:end]`."""
        if text.startswith(self._shown):
            new = text[len(self._shown) :]
        else:
            # A byte-fallback decoder turns a whole run of bytes to U+FFFD when one is wrong;
            # what was shown of the run stays.
            new = self._decode(self._ids[self._read : end])
        if not new:
            # Nothing to anchor on: keep the window as it is.
            return ""
        self._ids = self._ids[self._read :]
        self._read = end - self._read
        self._shown = self._decode(self._ids[: self._read])
        return new

    def _give_up_on_bytes(self, text: str) -> str:
        """Show a run of bytes that is no text, up to a point that no later byte can change.

        A cut with a full character's worth of tokens behind it is final if both sides decode
        apart as they do together.
        """
        last = len(self._ids) - _MAX_UTF8_BYTES
        for cut in range(last, max(last - _MAX_UTF8_BYTES, self._read), -1):
            head = self._decode(self._ids[:cut])
            if head + self._decode(self._ids[cut:]) == text:
                return self._advance(cut, head)
        return ""
