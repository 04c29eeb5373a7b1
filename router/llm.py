"""Offline generation: an engine in the calling process, no Ray and no HTTP."""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import cast

from tqdm import tqdm

from pageray.cluster.config import EngineConfig
from pageray.cluster.errors import ConfigError, InvalidParameterError
from pageray.cluster.generation import (
    FinishReason,
    GenerateRequest,
    RequestOutput,
    TokenLogprobs,
)
from pageray.cluster.ids import RequestId
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.chat_template import ChatTemplate, Message
from pageray.router.sequence_text import SequenceText
from pageray.router.tokenizer import Tokenizer
from pageray.router.tokenizer_source import resolve_tokenizer_folder
from pageray.workers.engine import Engine, EngineStats

Prompt = str | Sequence[int]
"""Text, or token ids."""


@dataclass(kw_only=True)
class GeneratedSequence:
    """One of a prompt's n continuations."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    """What the model produced and the text shows: an EOS or stop token at the end is left out."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one did."""
    logprobs: list[TokenLogprobs] = field(default_factory=list[TokenLogprobs])


@dataclass(kw_only=True)
class GenerationResult:
    """A prompt and its continuations."""

    prompt: Prompt
    prompt_token_ids: tuple[int, ...]
    outputs: list[GeneratedSequence]
    num_cached_tokens: int = 0
    """Prompt tokens whose pages were in the cache already."""


class LLM:
    """A model in this process.

        with LLM("smollm2-135m") as llm:
            print(llm.generate("The capital of France is")[0].outputs[0].text)

    `engine_kwargs` are `EngineConfig`'s fields. With `tensor_parallel_size` above 1 the ranks are
    child processes, so a script needs the usual `if __name__ == "__main__":`.
    Raises `ConfigError` or `ModelLoadError` when the engine cannot be built.
    """

    def __init__(
        self, model: str, *, tokenizer: str | None = None, **engine_kwargs: object
    ) -> None:
        self._engine = Engine.start(EngineConfig.from_mapping({"model": model, **engine_kwargs}))
        self._tokenizer = Tokenizer.from_folder(resolve_tokenizer_folder(tokenizer or model))
        template = self._tokenizer.config.chat_template
        self._chat_template = (
            None
            if template is None
            else ChatTemplate(template, self._tokenizer.config.special_tokens)
        )

    @property
    def engine(self) -> Engine:
        return self._engine

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[GenerationResult]:
        """Continue every prompt; results in the order of the prompts.

        `sampling_params`: for all prompts, or one for each. Raises a `ClientError` for a prompt
        that cannot be served, before anything is computed.
        """
        batch = _as_batch(prompts)
        settings = _one_each(sampling_params, len(batch))
        requests = [
            GenerateRequest(
                request_id=RequestId(uuid.uuid4().hex),
                prompt_token_ids=self._encode(prompt),
                sampling=sampling,
            )
            for prompt, sampling in zip(batch, settings, strict=True)
        ]
        for request in requests:
            self._engine.check_request(request)
        runs = {
            request.request_id: self._run_of(prompt, request)
            for prompt, request in zip(batch, requests, strict=True)
        }
        for request in requests:
            self._engine.add(request)
        try:
            self._drive(runs, use_tqdm)
        finally:
            for request in requests:  # an interrupt leaves nothing running
                self._engine.abort(request.request_id)
        return [run.result for run in runs.values()]

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
    ) -> GenerationResult:
        """The model's answer to a conversation, through the model's chat template."""
        if self._chat_template is None:
            raise InvalidParameterError(
                "This model has no chat template; use generate().", param="messages"
            )
        text = self._chat_template.render(messages)
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return self.generate([ids], sampling_params)[0]

    def close(self) -> None:
        self._engine.shutdown()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt)

    def _run_of(self, prompt: Prompt, request: GenerateRequest) -> "_Run":
        return _Run(prompt, request, self._tokenizer, self._engine.found.limits.eos_token_ids)

    def _drive(self, runs: Mapping[RequestId, "_Run"], use_tqdm: bool) -> None:
        with tqdm(total=len(runs), unit="prompt", disable=not use_tqdm) as bar:
            while self._engine.has_requests:
                for output in self._engine.step():
                    for index in runs[output.request_id].take(output):
                        self._engine.finish_sequence(output.request_id, index)
                    bar.update(runs[output.request_id].is_finished)


class _Run:
    """One prompt's outputs as they grow."""

    def __init__(
        self,
        prompt: Prompt,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self.result = GenerationResult(
            prompt=prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[GeneratedSequence(index=index) for index in range(request.sampling.n)],
        )
        self._texts = [
            SequenceText(
                tokenizer,
                request.sampling,
                prompt_token_ids=request.prompt_token_ids,
                eos_token_ids=eos_token_ids,
            )
            for _ in range(request.sampling.n)
        ]

    @property
    def is_finished(self) -> bool:
        return all(text.is_finished for text in self._texts)

    def take(self, output: RequestOutput) -> list[int]:
        """Add an engine step's news; the sequences that a stop string has ended, which the
        engine does not know of."""
        self.result.num_cached_tokens = output.num_cached_tokens
        stopped: list[int] = []
        for news in output.sequences:
            delta = self._texts[news.index].push(news)
            sequence = self.result.outputs[news.index]
            sequence.text += delta.text
            sequence.token_ids += delta.token_ids
            sequence.logprobs += delta.logprobs
            sequence.finish_reason = delta.finish_reason
            sequence.stop_reason = delta.stop_reason
            if delta.finish_reason is not None and news.finish_reason is None:
                stopped.append(news.index)
        return stopped


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if len(prompts) > 0 and isinstance(prompts[0], int):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def _one_each(
    sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if sampling_params is None:
        return [SamplingParams()] * count
    if isinstance(sampling_params, SamplingParams):
        return [sampling_params] * count
    if len(sampling_params) != count:
        raise ConfigError(
            f"{count} prompts but {len(sampling_params)} sampling_params: give one for all, or "
            "one for each."
        )
    return list(sampling_params)
