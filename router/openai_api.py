"""The endpoints' work, apart from HTTP routing: request bodies to engine requests to replies."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from pageray.cluster.errors import InvalidParameterError, ModelNotFoundError, PageRayError
from pageray.cluster.generation import GenerateRequest
from pageray.cluster.sampling_params import SamplingParams
from pageray.router.admission import check_num_sequences, check_request
from pageray.router.completion_run import CompletionRun
from pageray.router.openai.chat_reply import ChatReply
from pageray.router.openai.completion_reply import CompletionReply
from pageray.router.openai.reply import Reply, ReplyOptions
from pageray.router.openai.requests import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from pageray.router.openai.responses import (
    DetokenizeResponse,
    ModelCard,
    ModelList,
    TokenizeResponse,
)
from pageray.router.openai.sampling import GenerationFields
from pageray.router.request_id import new_request_id
from pageray.router.served_model import ServedModel

_THREAD_ABOVE_CHARS = 50_000
"""Text longer than this is tokenised off the event loop, which others' tokens pass through."""
_CARD_TIMEOUT_S = 2.0

T = TypeVar("T")


@dataclass(frozen=True)
class PreparedReply:
    """A run that may start, and the form of its reply."""

    run: CompletionRun
    reply: Reply
    is_stream: bool


class OpenAiApi:
    """Endpoints over a fixed set of models. Every method raises `PageRayError`s only."""

    def __init__(self, models: Sequence[ServedModel], *, created: int) -> None:
        """`created`: seconds since 1970, shown on the model cards."""
        self._models = {model.model_id: model for model in models}
        self._created = created

    async def list_models(self) -> ModelList:
        cards = await asyncio.gather(*(self._card(model) for model in self._models.values()))
        return ModelList(data=list(cards))

    async def get_model(self, model_id: str) -> ModelCard:
        return await self._card(self._model(model_id))

    async def prepare_chat(
        self, body: ChatCompletionRequest, session_id: str = ""
    ) -> PreparedReply:
        """Tokenise and check; nothing runs yet."""
        model = self._model(body.model)
        num_logprobs = body.num_logprobs
        prompt = await _tokenised(
            sum(_length(message) for message in body.messages),
            lambda: self._encode_chat(model, body),
        )
        sampling = body.sampling_params(
            model.defaults, max_tokens=body.output_limit, logprobs=num_logprobs
        )
        run = await self._run(model, body, "chatcmpl", [prompt], sampling, session_id)
        reply = ChatReply(_reply_options(body, "chatcmpl", num_logprobs), model.tokenizer)
        return PreparedReply(run, reply, bool(body.stream))

    async def prepare_completion(
        self, body: CompletionRequest, session_id: str = ""
    ) -> PreparedReply:
        """Tokenise and check; nothing runs yet."""
        model = self._model(body.model)
        prompts = body.prompts()
        add_special = body.add_special_tokens is not False
        token_ids = await _tokenised(
            sum(len(prompt) for prompt in prompts),
            lambda: [
                model.tokenizer.encode(prompt, add_special_tokens=add_special)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ],
        )
        sampling = body.sampling_params(
            model.defaults, max_tokens=body.output_limit, logprobs=body.logprobs
        )
        run = await self._run(model, body, "cmpl", token_ids, sampling, session_id)
        reply = CompletionReply(_reply_options(body, "cmpl", body.logprobs), model.tokenizer)
        return PreparedReply(run, reply, bool(body.stream))

    async def tokenize(self, body: TokenizeRequest) -> TokenizeResponse:
        model = self._model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameterError("Give either prompt or messages.", param="prompt")
        length = len(body.prompt or "") + sum(_length(m) for m in body.messages or ())
        tokens = await _tokenised(length, lambda: self._encode_any(model, body))
        facts = await model.client.facts()
        names = [model.tokenizer.token_name(token) for token in tokens]
        return TokenizeResponse(
            count=len(tokens),
            max_model_len=facts.max_model_len,
            tokens=tokens,
            token_strs=names if body.return_token_strs else None,
        )

    async def detokenize(self, body: DetokenizeRequest) -> DetokenizeResponse:
        tokenizer = self._model(body.model).tokenizer
        tokenizer.check_token_ids(body.tokens, param="tokens")
        text = tokenizer.decode(body.tokens, skip_special_tokens=body.skip_special_tokens)
        return DetokenizeResponse(prompt=text)

    async def check_health(self) -> None:
        """Raise the first model's error, if one cannot be served."""
        await asyncio.gather(*(model.client.check_health() for model in self._models.values()))

    def _model(self, model_id: str | None) -> ServedModel:
        """None means the first model (only the tokenize endpoints may leave it out)."""
        if model_id is None:
            return next(iter(self._models.values()))
        model = self._models.get(model_id)
        if model is None:
            raise ModelNotFoundError(
                f"The model {model_id[:200]!r} does not exist here. "
                f"There are: {', '.join(self._models)}.",
                param="model",
            )
        return model

    async def _card(self, model: ServedModel) -> ModelCard:
        try:
            facts = await asyncio.wait_for(model.client.facts(), _CARD_TIMEOUT_S)
            max_model_len = facts.max_model_len
        except (PageRayError, TimeoutError):
            # The list of models must not wait for an engine that is still loading.
            max_model_len = None
        return ModelCard(
            id=model.model_id,
            created=self._created,
            root=model.source,
            max_model_len=max_model_len,
        )

    def _encode_any(self, model: ServedModel, body: TokenizeRequest) -> list[int]:
        if body.messages is not None:
            return model.encode_chat(
                _template_messages(body.messages),
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=bool(body.continue_final_message),
                add_special_tokens=bool(body.add_special_tokens),
                template_kwargs=body.chat_template_kwargs,
            )
        return model.tokenizer.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False
        )

    def _encode_chat(self, model: ServedModel, body: ChatCompletionRequest) -> list[int]:
        return model.encode_chat(
            _template_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=bool(body.continue_final_message),
            add_special_tokens=bool(body.add_special_tokens),
            template_kwargs=body.chat_template_kwargs,
        )

    async def _run(  # noqa: PLR0917  # what a run is made of
        self,
        model: ServedModel,
        body: GenerationFields,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        session_id: str,
    ) -> CompletionRun:
        facts = await model.client.facts()
        requests = [
            GenerateRequest(
                request_id=new_request_id(prefix),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                cache_salt=body.cache_salt or "",
                session_id=session_id,
            )
            for prompt in prompts
        ]
        for request in requests:
            check_request(request, facts)
        check_num_sequences(len(requests), sampling.n)
        return CompletionRun(
            model.client,
            model.tokenizer,
            requests,
            eos_token_ids=facts.eos_token_ids,
            skip_special_tokens=body.skip_special_tokens is not False,
        )


async def _tokenised(num_chars: int, work: Callable[[], T]) -> T:
    if num_chars > _THREAD_ABOVE_CHARS:
        return await asyncio.to_thread(work)
    return work()


def _template_messages(messages: Sequence[ChatMessage]) -> list[Mapping[str, object]]:
    return [message.as_template_input(position) for position, message in enumerate(messages)]


def _length(message: ChatMessage) -> int:
    content = message.content
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.text or "") for part in content)


def _reply_options(body: GenerationFields, prefix: str, num_logprobs: int | None) -> ReplyOptions:
    return ReplyOptions(
        id=new_request_id(prefix),
        created=int(time.time()),
        model=body.model,
        has_logprobs=num_logprobs is not None,
        includes_usage=body.includes_usage_in_stream,
    )
