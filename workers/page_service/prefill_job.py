"""Prompts that an engine computes for another one."""

from typing import Protocol

from pageray.cluster.generation import GenerateRequest
from pageray.cluster.ids import RequestId


class PrefillJob(Protocol):
    """A prompt on its way through an engine. Thread-safe."""

    @property
    def request_id(self) -> RequestId:
        """At the engine that computes it."""
        ...

    @property
    def is_over(self) -> bool:
        """The prompt has been computed, or never will be."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the engine's cache; known once it is over."""
        ...

    def cancel(self) -> None:
        """Stop computing. No harm when it is over."""
        ...


class PrefillRunner(Protocol):
    def start_prefill(self, request: GenerateRequest) -> PrefillJob:
        """Queue the request's tokens as a prompt of which nothing is generated.

        Raises `ClientError` when it does not fit this engine, `EngineDeadError` when it is dead.
        """
        ...
