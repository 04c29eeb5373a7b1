"""Every error that PageRay raises on purpose, in one tree.

`ClientError`: the request is at fault (HTTP 4xx). `CapacityError`: come back later (429 or 503).
`ServerError`: our fault (5xx). The mapping to HTTP stands in one place, `router/http_errors.py`;
here each class only says what it is.
"""


class PageRayError(Exception):
    """Root of all deliberate errors. The message names the numbers and what to do."""


class ClientError(PageRayError):
    """The request cannot be served as it is.

    `param` names the offending field of the request, when there is one.
    """

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions cross process boundaries; the keyword-only argument needs help to survive.
        return (_rebuild_client_error, (type(self), self.message, self.param))


def _rebuild_client_error(cls: type[ClientError], message: str, param: str | None) -> ClientError:
    return cls(message, param=param)


class InvalidParameterError(ClientError):
    """A field has a value that is out of range, of the wrong type, or contradicts another."""


class ContextLengthError(ClientError):
    """prompt + max_tokens exceeds what the model or the KV pool can ever hold."""


class ModelNotFoundError(ClientError):
    """The request names a model (or adapter) that this application does not serve."""


class CapacityError(PageRayError):
    """Nothing is wrong with the request, but there is no room now.

    `retry_after_s` is a hint in seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return self.message


class ServerError(PageRayError):
    """A fault of ours; the request may be right."""


class ConfigError(PageRayError):
    """The configuration cannot be used; raised before anything is started."""


class ModelLoadError(PageRayError):
    """Weights, tokenizer or model configuration are missing, truncated or unsupported."""


class EngineDeadError(ServerError):
    """A rank or the engine's own loop is gone; the engine accepts nothing more."""
