"""Every packaged configuration is one that `serve deploy` takes."""

from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from pageray import build_openai_app, build_pd_openai_app
from pageray.router.builder import placement_bundles
from pageray.router.config_file import packaged_configs
from pageray.router.llm_config import parse_serving_args

CONFIGS = packaged_configs()
BUILDERS = {
    "pageray:build_openai_app": build_openai_app,
    "pageray:build_pd_openai_app": build_pd_openai_app,
}


def test_the_ones_that_the_documents_name_exist() -> None:
    assert {"cpu", "cpu-tp2", "cpu-2x1", "cpu-pd", "gpu-tp2", "gpu-tp8"} <= set(CONFIGS)


@pytest.mark.parametrize("path", CONFIGS.values(), ids=CONFIGS.keys())
def test_it_deploys(path: Path) -> None:
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    schema = ServeDeploySchema.model_validate(content)
    for application in schema.applications:
        build = BUILDERS[application.import_path]
        assert isinstance(build(cast("dict[str, object]", application.args)), Application)


@pytest.mark.parametrize(
    ("name", "num_replicas", "bundles"),
    [
        ("cpu", 1, [{"CPU": 0.1}] * 2),
        ("cpu-tp2", 1, [{"CPU": 0.1}] * 3),
        ("cpu-2x1", 2, [{"CPU": 0.1}] * 2),
        ("gpu-tp2", 1, [{"CPU": 0.1}] + [{"CPU": 0.1, "GPU": 1}] * 2),
        ("gpu-tp8", None, [{"CPU": 0.1}] + [{"CPU": 0.1, "GPU": 1}] * 8),
    ],
)
def test_what_it_asks_of_the_cluster(
    name: str, num_replicas: int | None, bundles: list[dict[str, float]]
) -> None:
    content = yaml.safe_load(CONFIGS[name].read_text())
    (config,) = parse_serving_args(content["applications"][0]["args"]).llm_configs
    assert placement_bundles(config) == bundles
    assert config.deployment_config.get("num_replicas") == num_replicas
