"""The command line, up to where a cluster would be started."""

import subprocess
import sys

import pytest

from pageray.router.cli import build_parser, main


def test_serve_takes_a_configuration_and_settings() -> None:
    arguments = build_parser().parse_args(
        ["serve", "cpu-tp2", "--set", "engine_kwargs.seed=1", "--set", "a=b", "--port", "9"]
    )
    assert (arguments.config, arguments.port) == ("cpu-tp2", 9)
    assert arguments.set == ["engine_kwargs.seed=1", "a=b"]
    assert build_parser().parse_args(["serve"]).config == "cpu"


def test_a_deliberate_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "no-such-config"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pageray: no-such-config is neither a file")
    assert captured.err.count("\n") == 1


def test_fetch_prints_the_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm2-135m"]) == 0
    assert capsys.readouterr().out.strip().endswith("smollm2-135m-instruct")


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("pageray", {"ray", "torch", "transformers"}),
        ("pageray.router.cli", {"ray", "torch", "transformers"}),
        ("pageray.router.builder", {"torch", "transformers"}),
        ("pageray.router.ingress", {"torch", "transformers"}),
    ],
)
def test_imports_stay_light(module: str, banned: set[str]) -> None:
    code = f"import sys, {module}; print(*({banned!r} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert found.stdout.split() == []


def test_the_packages_names_are_there() -> None:
    import pageray

    assert pageray.SamplingParams(n=2).n == 2
    assert callable(pageray.build_openai_app)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pageray.nothing  # pyright: ignore[reportAttributeAccessIssue]
