"""What `pageray serve` is going to do, worked out and checked before anything is started."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from pageray.cluster.config import reject_unknown_keys
from pageray.cluster.errors import ConfigError
from pageray.router.config_file import Override, Tree, apply_override, read_config
from pageray.router.llm_config import (
    LLMServingArgs,
    PDServingArgs,
    parse_pd_serving_args,
    parse_serving_args,
)

BUILDER = "pageray:build_openai_app"
PD_BUILDER = "pageray:build_pd_openai_app"
DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000

_APPLICATION_KEYS = ("args", "import_path", "name", "route_prefix")


@dataclass(frozen=True)
class PlannedApplication:
    name: str
    route_prefix: str
    args: LLMServingArgs | PDServingArgs


@dataclass(frozen=True)
class ServePlan:
    tree: Tree
    """The whole configuration file, overrides applied."""
    applications: tuple[PlannedApplication, ...]
    http_options: Mapping[str, object]
    host: str
    port: int

    @property
    def model_ids(self) -> list[str]:
        ids = (config.model_id for app in self.applications for config in app.args.llm_configs)
        # Prefill and decode engines serve one model.
        return list(dict.fromkeys(ids))

    @property
    def model_sources(self) -> list[str]:
        return [
            config.model_loading_config.source
            for app in self.applications
            for config in app.args.llm_configs
        ]

    @property
    def client_host(self) -> str:
        """Where a client on this machine connects to."""
        return DEFAULT_HOST if self.host in ("0.0.0.0", "::", "") else self.host


def make_plan(
    config: str, overrides: Sequence[str], host: str | None, port: int | None
) -> ServePlan:
    """Read, override and check. Raises `ConfigError`."""
    tree = read_config(config)
    for text in overrides:
        apply_override(tree, Override.parse(text))
    http_options = dict(_mapping(tree.get("http_options", {}), "http_options"))
    http_options["host"] = host or http_options.get("host", DEFAULT_HOST)
    http_options["port"] = port or http_options.get("port", DEFAULT_PORT)
    return ServePlan(
        tree=tree,
        applications=tuple(_planned(app) for app in _applications(tree)),
        http_options=http_options,
        host=str(http_options["host"]),
        port=_port(http_options["port"]),
    )


def _planned(application: Mapping[str, object]) -> PlannedApplication:
    reject_unknown_keys(application, _APPLICATION_KEYS, "applications (as pageray serve reads it)")
    return PlannedApplication(
        name=str(application.get("name", "default")),
        route_prefix=str(application.get("route_prefix", "/")),
        args=_args(application),
    )


def _args(application: Mapping[str, object]) -> LLMServingArgs | PDServingArgs:
    args = dict(_mapping(application.get("args", {}), "args"))
    builder = application.get("import_path")
    if builder == BUILDER:
        return parse_serving_args(args)
    if builder == PD_BUILDER:
        return parse_pd_serving_args(args)
    raise ConfigError(
        f"import_path is {builder!r}; pageray serve runs {BUILDER!r} and {PD_BUILDER!r} only. Use "
        "`serve deploy` for anything else."
    )


def _applications(tree: Tree) -> list[Mapping[str, object]]:
    applications = tree["applications"]
    if not isinstance(applications, list) or not applications:
        raise ConfigError("applications must be a list of at least one application.")
    items = cast("list[object]", applications)
    return [_mapping(item, "applications") for item in items]


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping, not {value!r}.")
    return cast("Mapping[str, object]", value)


def _port(value: object) -> int:
    if not isinstance(value, int) or not 0 < value < 2**16:
        raise ConfigError(f"http_options.port is {value!r}; it must be between 1 and 65535.")
    return value
