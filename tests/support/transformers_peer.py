# pyright: basic
# transformers is typed for its own use; this file is the boundary.
"""What transformers says: the peer whose greedy tokens ours must equal."""

from pathlib import Path

import torch
import transformers


class PeerTokenizer:
    def __init__(self, folder: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation with the generation prompt at its end."""
        return self._tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


class PeerModel:
    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=torch.float32
        )

    def generate_greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """Up to `num_tokens` tokens in float32, EOS included, for one prompt alone."""
        generated = self._model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            torch.tensor([token_ids]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=num_tokens,
            pad_token_id=0,
        )
        return generated[0, len(token_ids) :].tolist()


def load_tokenizer(folder: Path) -> PeerTokenizer:
    return PeerTokenizer(folder)


def load_model(folder: Path) -> PeerModel:
    return PeerModel(folder)
