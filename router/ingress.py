"""The Serve deployment that faces HTTP clients."""

import asyncio
import time
from collections.abc import Collection, Mapping

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from pageray.router.http_app import build_http_app
from pageray.router.llm_config import ModelLoadingConfig
from pageray.router.model_client import ServeModelClient
from pageray.router.openai_api import OpenAiApi
from pageray.router.served_model import ServedModel
from pageray.router.tokenizer_source import resolve_tokenizer_folder


class OpenAiIngress:
    """Tokenises, detokenises and cuts at stop strings; holds no model weights and no torch."""

    async def __init__(
        self,
        llm_deployments: Mapping[str, DeploymentHandle[object]],
        model_loading_configs: Mapping[str, ModelLoadingConfig],
        sharing_pages: Collection[str] = (),
        companions: Collection[DeploymentHandle[object]] = (),
    ) -> None:
        """The mappings are keyed by model id; `sharing_pages` are the ids of the models whose
        engines use each other's pages. `companions` are deployments that belong to the application
        and are not called from here. Waits for the tokenizers, not for the engines."""
        del companions
        models = await asyncio.gather(
            *(
                asyncio.to_thread(
                    _load, model_loading_configs[model_id], handle, model_id in sharing_pages
                )
                for model_id, handle in llm_deployments.items()
            )
        )
        self._api = OpenAiApi(models, created=int(time.time()))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Serve calls this once, after the constructor."""
        return build_http_app(self._api)


def _load(
    config: ModelLoadingConfig, handle: DeploymentHandle[object], shares_pages: bool
) -> ServedModel:
    folder = resolve_tokenizer_folder(config.tokenizer_source or config.source)
    return ServedModel.from_folder(
        folder,
        model_id=config.model_id,
        source=config.source,
        client=ServeModelClient(handle, is_cluster=shares_pages),
    )
