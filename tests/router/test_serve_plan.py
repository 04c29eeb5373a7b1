"""`pageray serve` works out what to do before it starts anything."""

import socket
from pathlib import Path

import pytest

from pageray.cluster.errors import ConfigError
from pageray.router.config_file import Override, Tree, apply_override, read_config
from pageray.router.http_port import check_port_is_free
from pageray.router.serve_plan import make_plan


def tree() -> Tree:
    return {
        "applications": [
            {
                "name": "one",
                "import_path": "pageray:build_openai_app",
                "args": {
                    "llm_configs": [
                        {"model_loading_config": {"model_id": "a"}},
                        {"model_loading_config": {"model_id": "b"}, "engine_kwargs": {"seed": 1}},
                    ]
                },
            }
        ]
    }


def after(text: str) -> Tree:
    changed = tree()
    apply_override(changed, Override.parse(text))
    return changed


def args_of(changed: Tree) -> Tree:
    return changed["applications"][0]["args"]  # pyright: ignore


def test_a_key_of_the_file() -> None:
    assert after("http_options.port=9000")["http_options"] == {"port": 9000}
    assert after("applications.0.name=two")["applications"][0]["name"] == "two"  # pyright: ignore


def test_a_key_of_the_applications_args() -> None:
    changed = args_of(after("ingress_deployment_config.num_replicas=2"))
    assert changed["ingress_deployment_config"] == {"num_replicas": 2}


def test_a_key_of_every_model() -> None:
    configs = args_of(after("engine_kwargs.max_model_len=2048"))["llm_configs"]
    assert [c["engine_kwargs"] for c in configs] == [  # pyright: ignore
        {"max_model_len": 2048},
        {"seed": 1, "max_model_len": 2048},
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("seed=1", 1), ("seed=1.5", 1.5), ("seed=true", True), ("seed=", None), ("seed=[a]", ["a"])],
)
def test_values_are_yaml(text: str, value: object) -> None:
    assert Override.parse(text).value == value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no_equals_sign", "path.to.key=value"),
        ("a..b=1", "path.to.key=value"),
        ("engine_kwarg.seed=1", "Did you mean 'engine_kwargs'"),
        ("applications.7.name=x", "no position in a list of 1"),
        ("applications.0.name.deeper=x", "is a value"),
        ("seed={", "not valid YAML"),
    ],
)
def test_a_wrong_override_is_told_so(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        after(text)


def test_a_misspelt_engine_setting_is_named() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_model_len'"):
        make_plan("cpu", ["engine_kwargs.max_model_length=1"], None, None)


def test_the_packaged_default() -> None:
    plan = make_plan("cpu", ["http_options.port=9000"], None, None)
    assert (plan.model_ids, plan.host, plan.port) == (["smollm2-135m"], "127.0.0.1", 9000)
    plan = make_plan("cpu.yaml", ["http_options.port=9000"], "0.0.0.0", 9001)
    assert (plan.host, plan.port, plan.client_host) == ("0.0.0.0", 9001, "127.0.0.1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("a: 1", "no `applications`"),
        ("applications: []", "at least one"),
        ("applications: [{import_path: 'x:y'}]", "serve deploy"),
        (
            "applications: [{import_path: 'pageray:build_openai_app', deployments: []}]",
            "unknown key 'deployments'",
        ),
        ("applications: [\n", "not valid YAML"),
    ],
)
def test_a_wrong_file_is_told_so(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        make_plan(str(path), [], None, None)


def test_an_unknown_name_lists_the_packaged_ones() -> None:
    with pytest.raises(ConfigError, match="cpu-tp2"):
        read_config("cpuu")


def test_a_taken_port_is_named_with_another() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port + 1}"):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)
