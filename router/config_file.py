"""Serve configuration files: finding them, and changing single values from the command line."""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from pageray.cluster.errors import ConfigError
from pageray.router.llm_config import LLMConfig, LLMServingArgs, PDServingArgs, load_yaml

DEFAULT_CONFIG = "cpu"

Tree = dict[str, object]

_SERVE_KEYS = (
    "applications",
    "controller_options",
    "grpc_options",
    "http_options",
    "logging_config",
    "proxy_location",
    "target_capacity",
    "tracing_config",
)
"""Top-level keys of a Serve configuration file."""

_ARGS_KEYS = (*LLMServingArgs.model_fields, *PDServingArgs.model_fields)


@dataclass(frozen=True)
class Override:
    """`path=value` of a `--set` option."""

    path: tuple[str, ...]
    value: object

    @classmethod
    def parse(cls, text: str) -> "Override":
        """The value is YAML: `2048` is a number, `[a, b]` a list. Raises `ConfigError`."""
        path, equals, value = text.partition("=")
        if not equals or not all(path.split(".")):
            raise ConfigError(f"--set {text}: write it as path.to.key=value.")
        try:
            return cls(tuple(path.split(".")), yaml.safe_load(value))
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {text}: the value is not valid YAML: {error}") from error


def packaged_configs() -> dict[str, Path]:
    """Name to path of the configurations that come with the package."""
    folder = Path(__file__).parent.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def read_config(name_or_path: str) -> Tree:
    """The mapping in a file, or in a packaged configuration. Raises `ConfigError`."""
    packaged = packaged_configs()
    path = packaged.get(name_or_path.removesuffix(".yaml"), Path(name_or_path))
    if not path.is_file():
        raise ConfigError(
            f"{name_or_path} is neither a file nor a packaged configuration "
            f"({', '.join(packaged)})."
        )
    tree = load_yaml(path)
    if not isinstance(tree, dict) or "applications" not in tree:
        raise ConfigError(f"{path} is no Serve configuration: it has no `applications`.")
    return cast(Tree, tree)


def apply_override(tree: Tree, override: Override) -> None:
    """Set one value in `tree`, in place.

    The path's first key says where it starts: a key of the whole file, else of each application's
    args, else of each llm_config. What is below the first key is checked when the configuration
    is used. Raises `ConfigError` naming the nearest key when none of them has it.
    """
    first = override.path[0]
    if first in _SERVE_KEYS:
        _set(tree, override)
    elif first in _ARGS_KEYS:
        for args in _application_args(tree):
            _set(args, override)
    elif first in LLMConfig.model_fields:
        for args in _application_args(tree):
            for config in _llm_configs(args):
                _set(config, override)
    else:
        known = [*_SERVE_KEYS, *_ARGS_KEYS, *LLMConfig.model_fields]
        raise ConfigError(f"--set {'.'.join(override.path)}: {_nearest(first, known)}")


def application_args(tree: Tree, import_path: str) -> list[Tree]:
    """Args of the applications that `import_path` builds."""
    return [
        cast(Tree, application.get("args", {}))
        for application in _mappings(tree["applications"])
        if application.get("import_path") == import_path
    ]


def _llm_configs(args: Tree) -> list[Tree]:
    """Those of `build_openai_app`, and of `build_pd_openai_app`."""
    apart = [args[name] for name in ("prefill_config", "decode_config") if name in args]
    return _mappings(args.get("llm_configs")) + _mappings(apart)


def _application_args(tree: Tree) -> list[Tree]:
    return [
        cast(Tree, application.setdefault("args", {}))
        for application in _mappings(tree["applications"])
    ]


def _set(tree: Tree, override: Override) -> None:
    """Walk to the last key, making mappings on the way and taking numbers as list positions."""
    where: object = tree
    walked: list[str] = []
    for key in override.path[:-1]:
        walked.append(key)
        where = _step(where, key, walked)
    last = override.path[-1]
    if isinstance(where, list):
        items = cast(list[object], where)
        items[_position(items, last, override.path)] = override.value
    elif isinstance(where, dict):
        cast(Tree, where)[last] = override.value
    else:
        raise ConfigError(f"--set {'.'.join(override.path)}: {'.'.join(walked)} is a value.")


def _step(where: object, key: str, walked: Sequence[str]) -> object:
    if isinstance(where, list):
        items = cast(list[object], where)
        return items[_position(items, key, walked)]
    if isinstance(where, dict):
        mapping = cast(Tree, where)
        if mapping.get(key) is None:
            mapping[key] = {}
        return mapping[key]
    raise ConfigError(f"--set {'.'.join(walked)}: {'.'.join(walked[:-1])} is a value.")


def _position(items: Sequence[object], key: str, walked: Sequence[str]) -> int:
    if not key.isdecimal() or int(key) >= len(items):
        raise ConfigError(
            f"--set {'.'.join(walked)}: {key} is no position in a list of {len(items)}."
        )
    return int(key)


def _mappings(value: object) -> list[Tree]:
    items = cast(list[object], value) if isinstance(value, list) else []
    return [cast(Tree, item) for item in items if isinstance(item, dict)]


def _nearest(key: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(key, list(known), n=1)
    return f"there is no {key!r}." + (f" Did you mean {near[0]!r}?" if near else "")
