"""What a configuration may say, and how it is told that it is wrong."""

from pathlib import Path
from typing import Any

import pytest

from pageray.cluster.errors import ConfigError
from pageray.router.builder import build_llm_deployment, deployment_name, placement_bundles
from pageray.router.llm_config import LLMConfig, LLMServingArgs, parse_serving_args

MODEL: dict[str, Any] = {"model_loading_config": {"model_id": "m"}}


def config(**fields: Any) -> LLMConfig:
    return LLMConfig.model_validate({**MODEL, **fields})


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"llm_config": []}, "Did you mean 'llm_configs'"),
    ({"llm_configs": []}, "llm_configs"),
    ({"llm_configs": [{}]}, "llm_configs.0.model_loading_config"),
    ({"llm_configs": [{**MODEL, "engine_kwarg": {}}]}, "Did you mean 'engine_kwargs'"),
    (
        {"llm_configs": [{"model_loading_config": {"model_idd": "m"}}]},
        "Did you mean 'model_id'",
    ),
    (
        {"llm_configs": [{**MODEL, "engine_kwargs": {"max_model_length": 1}}]},
        "Did you mean 'max_model_len'",
    ),
    ({"llm_configs": [{**MODEL, "engine_kwargs": {"max_num_seqs": 0}}]}, "max_num_seqs is 0"),
    ({"llm_configs": [{**MODEL, "engine_kwargs": {"model": "x"}}]}, "model_source"),
    (
        {"llm_configs": [{**MODEL, "deployment_config": {"num_replica": 2}}]},
        "Did you mean 'num_replicas'",
    ),
    (
        {"llm_configs": [{**MODEL, "placement_group_config": {"strategy": "TIGHT"}}]},
        "placement_group_config.strategy",
    ),
    ({"llm_configs": [MODEL, MODEL]}, "'m' occurs twice"),
    ({"llm_configs": ["/no/such.yaml"]}, "/no/such.yaml cannot be read"),
    (
        {"llm_configs": [MODEL], "ingress_deployment_config": {"replicas": 2}},
        "ingress_deployment_config",
    ),
]


@pytest.mark.parametrize(("args", "words"), WRONG)
def test_a_wrong_configuration_is_told_so(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_serving_args(args)


def test_a_model_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text("model_loading_config: {model_id: from-file}\n")
    args = parse_serving_args({"llm_configs": [str(path), MODEL]})
    assert [c.model_id for c in args.llm_configs] == ["from-file", "m"]


def test_the_source_defaults_to_the_id() -> None:
    assert config().engine_config().model == "m"
    loaded = {"model_loading_config": {"model_id": "m", "model_source": "/folder"}}
    assert config(**loaded).engine_config().model == "/folder"


def test_deployment_names_are_ray_serve_llms() -> None:
    assert deployment_name("org/model-3.1") == "LLMServer:org--model-3_1"


@pytest.mark.parametrize(
    ("fields", "rank_bundle"),
    [
        ({}, {"CPU": 0.1}),
        ({"engine_kwargs": {"device": "cuda"}}, {"CPU": 0.1, "GPU": 1}),
        (
            {"accelerator_type": "H100"},
            {"CPU": 0.1, "GPU": 1, "accelerator_type:H100": 0.001},
        ),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 2}}}, {"CPU": 2}),
    ],
)
def test_one_bundle_for_the_replica_and_one_per_rank(
    fields: dict[str, Any], rank_bundle: dict[str, float]
) -> None:
    settings = {**fields.get("engine_kwargs", {}), "tensor_parallel_size": 3}
    bundles = placement_bundles(config(**{**fields, "engine_kwargs": settings}))
    assert bundles == [{"CPU": 0.1}, rank_bundle, rank_bundle, rank_bundle]


def test_bundles_must_be_as_many_as_ranks() -> None:
    with pytest.raises(ConfigError, match=r"2 bundles for 1 ranks"):
        placement_bundles(config(placement_group_config={"bundles": [{"CPU": 1}, {"CPU": 1}]}))


def test_the_replicas_bundle_holds_its_actor() -> None:
    options = {"ray_actor_options": {"num_cpus": 2}}
    assert placement_bundles(config(deployment_config=options))[0] == {"CPU": 2}


def test_a_deployment_takes_its_options() -> None:
    application = build_llm_deployment(
        config(
            deployment_config={"num_replicas": 2, "max_ongoing_requests": 7},
            runtime_env={"env_vars": {"A": "b"}},
        )
    )
    deployment = application._bound_deployment  # pyright: ignore[reportPrivateUsage]
    assert deployment.name == "LLMServer:m"
    assert (deployment.num_replicas, deployment.max_ongoing_requests) == (2, 7)
    assert deployment.ray_actor_options == {
        "num_cpus": 0.1,
        "runtime_env": {"env_vars": {"A": "b"}},
    }


def test_a_configuration_cannot_be_changed() -> None:
    args = LLMServingArgs.model_validate({"llm_configs": [MODEL]})
    with pytest.raises(ValueError, match="frozen"):
        args.llm_configs[0].accelerator_type = "H100"
