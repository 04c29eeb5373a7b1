"""The configuration of an application: the names and shapes of Ray Serve LLM.

Checked when the application is built, before anything is started. An unknown key is an error
that names the nearest valid one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypeVar, cast

import pydantic
import yaml

from pageray.cluster.config import EngineConfig, reject_unknown_keys
from pageray.cluster.errors import ConfigError

DEPLOYMENT_OPTIONS = (
    "autoscaling_config",
    "graceful_shutdown_timeout_s",
    "graceful_shutdown_wait_loop_s",
    "health_check_period_s",
    "health_check_timeout_s",
    "logging_config",
    "max_ongoing_requests",
    "max_queued_requests",
    "max_replicas_per_node",
    "name",
    "num_replicas",
    "ray_actor_options",
    "request_router_config",
    "user_config",
)
"""Options of `serve.deployment` that a configuration may set."""


class StrictModel(pydantic.BaseModel):
    """Immutable; raises `ConfigError` for unknown keys."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _reject_unknown_keys(cls, values: object) -> object:
        if isinstance(values, Mapping):
            keys = cast(Mapping[str, object], values)
            reject_unknown_keys(keys, cls.model_fields, cls.__name__)
        return values  # pyright: ignore[reportUnknownVariableType]


class ModelLoadingConfig(StrictModel):
    model_id: str = pydantic.Field(min_length=1)
    """The name that clients use."""
    model_source: str | None = None
    """A folder, a hub id or an embedded model's name; None: the same as model_id."""
    tokenizer_source: str | None = None
    """None: the tokenizer comes with the model."""

    @property
    def source(self) -> str:
        return self.model_source or self.model_id


class PlacementGroupConfig(StrictModel):
    """Resources of the ranks. The replica's own actor gets a bundle in front of these."""

    bundle_per_worker: dict[str, float] | None = None
    """The same bundle for every rank."""
    bundles: list[dict[str, float]] | None = None
    """One bundle per rank, in order."""
    strategy: Literal["PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD"] = "STRICT_PACK"


class LLMConfig(StrictModel):
    """One model: where it comes from, how its engines run and how Serve deploys them."""

    model_loading_config: ModelLoadingConfig
    engine_kwargs: dict[str, object] = {}
    """Fields of `EngineConfig` but `model`."""
    accelerator_type: str | None = None
    """A Ray accelerator type such as H100; the ranks run on nodes that have it."""
    placement_group_config: PlacementGroupConfig | None = None
    deployment_config: dict[str, object] = {}
    """Options of `serve.deployment`; see `DEPLOYMENT_OPTIONS`."""
    runtime_env: dict[str, object] | None = None
    log_engine_metrics: bool = True
    share_pages: bool = True
    """Let the application's engines use each other's prefixes; takes a coordinator process."""
    move_pages: bool = True
    """False: a request goes to where its prefix is, or has it computed; no page is ever moved."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "LLMConfig":
        reject_unknown_keys(self.deployment_config, DEPLOYMENT_OPTIONS, "deployment_config")
        if "model" in self.engine_kwargs:
            raise ConfigError(
                "engine_kwargs: model is set by model_loading_config.model_source. Remove it."
            )
        self.engine_config()
        return self

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    def engine_config(self) -> EngineConfig:
        """Raises `ConfigError` for an unknown or impossible engine setting."""
        settings: dict[str, object] = {"device": self._device(), **self.engine_kwargs}
        return EngineConfig.from_mapping({**settings, "model": self.model_loading_config.source})

    def uses_gpu(self) -> bool:
        """Known before any machine is seen, since Serve must place the replica first: an
        accelerator is named, or the device is set to cuda."""
        return self.engine_config().device == "cuda"

    def _device(self) -> str:
        return "cpu" if self.accelerator_type is None else "cuda"


class LLMServingArgs(StrictModel):
    """The argument of `build_openai_app`."""

    llm_configs: list[LLMConfig] = pydantic.Field(min_length=1)
    """Each a mapping, or the path of a YAML file with one."""
    ingress_deployment_config: dict[str, object] = {}
    """Options of `serve.deployment` for the ingress."""

    @pydantic.field_validator("llm_configs", mode="before")
    @classmethod
    def _load_files(cls, values: object) -> object:
        if not isinstance(values, list):
            return values
        items = cast(list[object], values)
        return [load_yaml(Path(item)) if isinstance(item, str) else item for item in items]

    @pydantic.model_validator(mode="after")
    def _check(self) -> "LLMServingArgs":
        reject_unknown_keys(
            self.ingress_deployment_config, DEPLOYMENT_OPTIONS, "ingress_deployment_config"
        )
        ids = [config.model_id for config in self.llm_configs]
        for model_id in ids:
            if ids.count(model_id) > 1:
                raise ConfigError(f"model_id {model_id!r} occurs twice in llm_configs.")
        return self


class PDServingArgs(StrictModel):
    """The argument of `build_pd_openai_app`: one model, prefill and decode on engines of their
    own. Both configurations name the same model, dtype and block size, or no page could be used."""

    prefill_config: LLMConfig
    decode_config: LLMConfig
    ingress_deployment_config: dict[str, object] = {}
    """Options of `serve.deployment` for the ingress."""

    @pydantic.model_validator(mode="after")
    def _check(self) -> "PDServingArgs":
        reject_unknown_keys(
            self.ingress_deployment_config, DEPLOYMENT_OPTIONS, "ingress_deployment_config"
        )
        prefill, decode = self.prefill_config, self.decode_config
        if prefill.model_loading_config != decode.model_loading_config:
            raise ConfigError(
                f"prefill_config serves {prefill.model_id!r} and decode_config "
                f"{decode.model_id!r}; both must name the same model."
            )
        theirs_all, ours_all = prefill.engine_config(), decode.engine_config()
        for name, theirs, ours in (
            ("block_size", theirs_all.block_size, ours_all.block_size),
            ("dtype", theirs_all.dtype, ours_all.dtype),
            ("kv_cache_dtype", theirs_all.kv_cache_dtype, ours_all.kv_cache_dtype),
        ):
            if theirs != ours:
                raise ConfigError(
                    f"{name} is {theirs!r} in prefill_config and {ours!r} in decode_config; pages "
                    "can be shared only if it is the same."
                )
        if not (prefill.share_pages and decode.share_pages):
            raise ConfigError(
                "share_pages is false: prefill engines could give their pages to nobody."
            )
        if not (prefill.move_pages and decode.move_pages):
            raise ConfigError("move_pages is false: decode engines could get no pages.")
        return self

    @property
    def llm_configs(self) -> list[LLMConfig]:
        return [self.prefill_config, self.decode_config]


ArgsT = TypeVar("ArgsT", LLMServingArgs, PDServingArgs)


def parse_serving_args(args: "dict[str, object] | LLMServingArgs") -> LLMServingArgs:
    """Raises `ConfigError` whose message names the field and what is wrong with it."""
    return args if isinstance(args, LLMServingArgs) else _validated(LLMServingArgs, args)


def parse_pd_serving_args(args: "dict[str, object] | PDServingArgs") -> PDServingArgs:
    """As `parse_serving_args`, for prefill/decode disaggregation."""
    return args if isinstance(args, PDServingArgs) else _validated(PDServingArgs, args)


def _validated(kind: type[ArgsT], args: dict[str, object]) -> ArgsT:
    try:
        return kind.model_validate(args)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_context=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        raise ConfigError(f"{path}: {problem['msg']}.") from error


def load_yaml(path: Path) -> object:
    """The content of a YAML file; raises `ConfigError` when it is missing or no YAML."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
