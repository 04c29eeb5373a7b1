"""The router's `ModelClient` over a server object in this process, through the same bytes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pageray.cluster.generation import GenerateRequest, RequestOutput
from pageray.cluster.ids import RequestId
from pageray.router.llm_config import LLMConfig, ModelLoadingConfig
from pageray.router.server import LLMServer
from pageray.router.wire import ModelFacts, decode_facts, decode_frame, encode_request
from scripted_engine import ScriptedEngine


class LocalModelClient:
    def __init__(self, server: LLMServer) -> None:
        self._server = server

    async def facts(self) -> ModelFacts:
        return decode_facts(await self._server.facts())

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestOutput, None]:
        async with aclosing(self._server.generate(encode_request(request))) as frames:
            async for frame in frames:
                content = decode_frame(frame)
                if isinstance(content, RequestOutput):
                    yield content

    async def finish_sequence(self, request_id: RequestId, index: int) -> None:
        await self._server.finish_sequence(request_id, index)

    async def check_health(self) -> None:
        await self._server.check_health()


async def start_server(engine: ScriptedEngine) -> LLMServer:
    """An `LLMServer` around `engine`, constructed as Serve constructs it."""
    server = LLMServer.__new__(LLMServer)
    config = LLMConfig(
        model_loading_config=ModelLoadingConfig(model_id="test"), log_engine_metrics=False
    )
    await server.__init__(config, lambda _: engine)
    return server
