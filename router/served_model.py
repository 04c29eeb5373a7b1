"""One model as the ingress holds it: tokenizer, template, defaults, and the way to its servers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pageray.cluster.errors import InvalidParameterError, ModelLoadError
from pageray.router.chat_template import ChatTemplate, Message
from pageray.router.model_client import ModelClient
from pageray.router.openai.sampling import SamplingDefaults
from pageray.router.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    model_id: str
    source: str
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    defaults: SamplingDefaults
    client: ModelClient

    @classmethod
    def from_folder(
        cls, folder: Path, *, model_id: str, source: str, client: ModelClient
    ) -> "ServedModel":
        """Read tokenizer, chat template and sampling defaults; raises `ModelLoadError`."""
        tokenizer = Tokenizer.from_folder(folder)
        template = tokenizer.config.chat_template
        return cls(
            model_id=model_id,
            source=source,
            tokenizer=tokenizer,
            chat_template=(
                None
                if template is None
                else ChatTemplate(template, tokenizer.config.special_tokens)
            ),
            defaults=load_sampling_defaults(folder),
            client=client,
        )

    def encode_chat(
        self,
        messages: list[Message],
        *,
        add_generation_prompt: bool | None,
        continue_final_message: bool,
        add_special_tokens: bool,
        template_kwargs: Mapping[str, object] | None,
    ) -> list[int]:
        """Prompt ids of a conversation. `add_generation_prompt` None: unless the final message is
        to be continued. Raises `InvalidParameterError`."""
        if self.chat_template is None:
            raise InvalidParameterError(
                f"Model {self.model_id!r} has no chat template. Use /v1/completions.",
                param="messages",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        text = self.chat_template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=template_kwargs,
        )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


def load_sampling_defaults(folder: Path) -> SamplingDefaults:
    """The model's recommendations from `generation_config.json`; without the file, neutral ones.

    `do_sample: false` or a field that is null says nothing about how to serve.
    """
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        raw = msgspec.convert(json.loads(path.read_text(encoding="utf-8")), dict[str, object])
        given = {key: value for key, value in raw.items() if value is not None}
        return msgspec.convert(given, SamplingDefaults)
    except (ValueError, msgspec.ValidationError) as error:
        raise ModelLoadError(f"{path} is not understood: {error}") from error
