"""One generated sequence as its client sees it: text, counted tokens, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass

from pageray.cluster.generation import FinishReason, SequenceOutput, TokenLogprobs
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.detokenizer import Detokenizer
from pageray.router.stop_strings import StopStringFilter
from pageray.router.tokenizer import Tokenizer


@dataclass(frozen=True)
class TextDelta:
    """What one step added. `token_ids` and `logprobs` are those of the shown sequence: without
    the EOS or stop token that ended it (unless `include_stop_str_in_output`), and nothing after
    a stop string."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the sequence (vLLM's field)."""

    def followed_by(self, later: "TextDelta") -> "TextDelta":
        """Both as one."""
        return TextDelta(
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=self.logprobs + later.logprobs,
            finish_reason=later.finish_reason,
            stop_reason=later.stop_reason,
        )


class SequenceText:
    """Turns `SequenceOutput`s of one sequence into `TextDelta`s.

    `num_tokens` counts generated tokens, the one that ended the sequence included, as `usage`
    does. Stop strings are not looked for in the text of the first `min_tokens` tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        *,
        prompt_token_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._detokenizer = Detokenizer(
            tokenizer, context_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens
        )
        self._stops = StopStringFilter(
            sampling.stop, include_stop=sampling.include_stop_str_in_output
        )
        self._min_tokens = sampling.min_tokens
        self._show_stop_token = sampling.include_stop_str_in_output
        self._eos_token_ids = frozenset(eos_token_ids)
        self.num_tokens = 0
        self.is_finished = False

    def push(self, output: SequenceOutput) -> TextDelta:
        """Take the engine's news. Must not be called once `is_finished`."""
        assert not self.is_finished, "the sequence has ended; later output must be dropped"
        is_stopped = output.stop_token_id is not None and not self._show_stop_token
        shown = len(output.token_ids) - is_stopped
        pieces: list[str] = []
        for position, token_id in enumerate(output.token_ids[:shown]):
            self.num_tokens += 1
            text, stop = self._take(self._detokenizer.push(token_id))
            pieces.append(text)
            if stop is not None:
                return self._stopped(output, position + 1, pieces, stop)
        self.num_tokens += len(output.token_ids) - shown
        if output.finish_reason is not None:
            text, stop = self._take(self._detokenizer.flush())
            pieces.append(text)
            if stop is not None:
                return self._stopped(output, shown, pieces, stop)
            pieces.append(self._stops.release())
        return self._delta(output, shown, pieces, output.finish_reason, self._stop_token(output))

    def _take(self, piece: str) -> tuple[str, str | None]:
        if self.num_tokens <= self._min_tokens:
            return piece, None
        result = self._stops.push(piece)
        return result.text, result.stop

    def _stop_token(self, output: SequenceOutput) -> int | None:
        """A stop token is worth naming; EOS is the ordinary end."""
        token_id = output.stop_token_id
        return None if token_id in self._eos_token_ids else token_id

    def _stopped(
        self, output: SequenceOutput, shown: int, pieces: list[str], stop: str
    ) -> TextDelta:
        return self._delta(output, shown, pieces, FinishReason.STOP, stop)

    def _delta(
        self,
        output: SequenceOutput,
        shown: int,
        pieces: list[str],
        finish_reason: FinishReason | None,
        stop_reason: str | int | None,
    ) -> TextDelta:
        self.is_finished = finish_reason is not None
        return TextDelta(
            text="".join(pieces),
            token_ids=output.token_ids[:shown],
            logprobs=output.logprobs[:shown],
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )
