"""The one place where an application's parts are wired together."""

from collections.abc import Callable, Mapping
from typing import cast

from ray import serve
from ray.serve import Application

from pageray.cluster.coordinator.messages import Role
from pageray.cluster.errors import ConfigError
from pageray.router.engine_protocol import EngineFactory, start_async_engine
from pageray.router.ingress import OpenAiIngress
from pageray.router.llm_config import (
    LLMConfig,
    LLMServingArgs,
    PDServingArgs,
    parse_pd_serving_args,
    parse_serving_args,
)
from pageray.router.server import LLMServer

DEPLOYMENT_NAME_PREFIX = "LLMServer:"

_ACTOR_CPUS = 0.1
"""CPU shares only steer placement. They are small, so that one core can hold a whole system:
ranks use the cores they find, and waiting on I/O takes none."""
_ACCELERATOR_SHARE = 0.001
"""Ray's way of saying "on a node with this accelerator" in a bundle."""

_SERVER_DEFAULTS: Mapping[str, object] = {
    # The engine queues better than Serve does: it knows its memory.
    "max_ongoing_requests": 512,
    # Looking costs nothing, and Serve replaces a replica only after three looks in a row failed.
    "health_check_period_s": 2,
    "health_check_timeout_s": 30,
    "graceful_shutdown_wait_loop_s": 1,
    "graceful_shutdown_timeout_s": 60,
    "request_router_config": {
        "request_router_class": "pageray.router.placement_router:PlacementRouter",
    },
}
_INGRESS_DEFAULTS: Mapping[str, object] = {
    "max_ongoing_requests": 2048,
    "graceful_shutdown_wait_loop_s": 1,
    "graceful_shutdown_timeout_s": 60,
}


def build_openai_app(args: dict[str, object] | LLMServingArgs) -> Application:
    """The application of a Serve config's `import_path: pageray:build_openai_app`.

    Raises `ConfigError` before anything is started.
    """
    return build_application(parse_serving_args(args))


def build_application(
    serving_args: LLMServingArgs, *, engine_factory: EngineFactory = start_async_engine
) -> Application:
    """As `build_openai_app`, which Serve allows one parameter only."""
    configs = serving_args.llm_configs
    return _bind_ingress(
        serving_args.ingress_deployment_config,
        configs,
        {
            config.model_id: build_llm_deployment(config, engine_factory=engine_factory)
            for config in configs
        },
        [],
    )


def build_pd_openai_app(args: dict[str, object] | PDServingArgs) -> Application:
    """Prefill/decode disaggregation: prompts are computed by engines that do nothing else, and
    their pages pushed to the engine that goes on with the request.

    For a Serve config's `import_path: pageray:build_pd_openai_app`. Raises `ConfigError`.
    """
    return build_pd_application(parse_pd_serving_args(args))


def build_pd_application(
    serving_args: PDServingArgs, *, engine_factory: EngineFactory = start_async_engine
) -> Application:
    """As `build_pd_openai_app`, which Serve allows one parameter only."""
    prefill, decode = serving_args.prefill_config, serving_args.decode_config
    return _bind_ingress(
        serving_args.ingress_deployment_config,
        [decode],
        {
            decode.model_id: build_llm_deployment(
                decode, engine_factory=engine_factory, role="decode"
            )
        },
        # The ingress never calls them; decode engines find them through the coordinator.
        [build_llm_deployment(prefill, engine_factory=engine_factory, role="prefill")],
    )


def _bind_ingress(
    deployment_config: Mapping[str, object],
    configs: list[LLMConfig],
    llm_deployments: dict[str, Application],
    companions: list[Application],
) -> Application:
    ingress = cast("type[OpenAiIngress]", serve.ingress()(OpenAiIngress))
    options = _options({"name": "OpenAiIngress", **_INGRESS_DEFAULTS}, deployment_config)
    return _deployment(ingress, options).bind(
        llm_deployments=llm_deployments,
        model_loading_configs={config.model_id: config.model_loading_config for config in configs},
        sharing_pages=[config.model_id for config in configs if config.share_pages],
        companions=companions,
    )


def build_llm_deployment(
    llm_config: LLMConfig,
    *,
    engine_factory: EngineFactory = start_async_engine,
    role: Role = "both",
) -> Application:
    """The deployment of one model's engines, without HTTP in front.

    Bundle 0 of each replica's placement group is for the replica itself, bundle 1 + r for rank r.
    """
    placement = llm_config.placement_group_config
    options = _options(
        {
            "name": deployment_name(llm_config.model_id, role),
            "placement_group_bundles": placement_bundles(llm_config),
            "placement_group_strategy": "STRICT_PACK" if placement is None else placement.strategy,
            **_SERVER_DEFAULTS,
        },
        llm_config.deployment_config,
    )
    if llm_config.runtime_env is not None:
        actor_options = cast(dict[str, object], options["ray_actor_options"])
        actor_options.setdefault("runtime_env", llm_config.runtime_env)
    return _deployment(LLMServer, options).bind(llm_config, engine_factory, role)


def deployment_name(model_id: str, role: Role = "both") -> str:
    """Ray Serve LLM's convention: `LLMServer:` and the id with / as -- and . as _; in front of it
    `Prefill` or `Decode` where the two are apart."""
    prefix = "" if role == "both" else role.capitalize()
    return prefix + DEPLOYMENT_NAME_PREFIX + model_id.replace("/", "--").replace(".", "_")


def placement_bundles(llm_config: LLMConfig) -> list[dict[str, float]]:
    """The replica's bundle, then one per rank. Raises `ConfigError` when the configuration names
    another number of bundles than ranks."""
    replica_cpus = _replica_cpus(llm_config.deployment_config)
    return [{"CPU": replica_cpus}, *_rank_bundles(llm_config)]


def _rank_bundles(llm_config: LLMConfig) -> list[dict[str, float]]:
    num_ranks = llm_config.engine_config().tensor_parallel_size
    placement = llm_config.placement_group_config
    if placement is not None and placement.bundles is not None:
        if len(placement.bundles) != num_ranks:
            raise ConfigError(
                f"placement_group_config has {len(placement.bundles)} bundles for "
                f"{num_ranks} ranks (tensor_parallel_size). Give one per rank."
            )
        return placement.bundles
    if placement is not None and placement.bundle_per_worker is not None:
        return [dict(placement.bundle_per_worker) for _ in range(num_ranks)]
    bundle: dict[str, float] = {"CPU": _ACTOR_CPUS}
    if llm_config.uses_gpu():
        bundle["GPU"] = 1
    if llm_config.accelerator_type is not None:
        bundle[f"accelerator_type:{llm_config.accelerator_type}"] = _ACCELERATOR_SHARE
    return [dict(bundle) for _ in range(num_ranks)]


def _replica_cpus(deployment_config: Mapping[str, object]) -> float:
    actor_options = _actor_options(deployment_config)
    return float(cast(float, actor_options["num_cpus"]))


def _deployment(cls: type, options: Mapping[str, object]) -> serve.Deployment:
    """Serve checks the options' names and types itself, and says what is wrong with them."""
    # Annotated for decorators, and with a parameter of its own type per option.
    deployment = cast(serve.Deployment, serve.deployment(cls))
    with_options = cast("Callable[..., serve.Deployment]", deployment.options)
    return with_options(**options)


def _options(defaults: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """Deployment options: what the configuration says over what is usual here."""
    options = {**defaults, **given}
    options["ray_actor_options"] = _actor_options(given)
    return options


def _actor_options(deployment_config: Mapping[str, object]) -> dict[str, object]:
    given = deployment_config.get("ray_actor_options", {})
    if not isinstance(given, Mapping):
        raise ConfigError("deployment_config.ray_actor_options must be a mapping.")
    return {"num_cpus": _ACTOR_CPUS, **cast("Mapping[str, object]", given)}
