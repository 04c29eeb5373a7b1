"""Every GPU kernel compiles ahead of time, without a GPU, and fits the device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Runs in a process of its own: kernels of a process with TRITON_INTERPRET cannot be compiled.
_COMPILE = """
import json
import torch
from pageray.kernels.gpu.compile_report import CompileTarget, compile_all
from pageray.kernels.gpu.attention_variants import CAPPED, FP8_KV_CAPPED, PLAIN
from pageray.kernels.gpu.model_launches import GEMMA_3_12B, LLAMA_3_8B

def target(shape, variant):
    return CompileTarget(capability=90, shape=shape, dtype=torch.bfloat16, variant=variant)

targets = [
    target(LLAMA_3_8B, PLAIN),
    target(LLAMA_3_8B, CAPPED),
    target(GEMMA_3_12B, FP8_KV_CAPPED),
]
print(json.dumps([
    {
        "name": f"{report.kernel} {report.target.shape.name} {report.target.variant.name}",
        "kernel": report.kernel,
        "registers": report.registers,
        "shared_bytes": report.shared_bytes,
        "local_bytes": report.local_bytes,
        "fits": report.fits,
    }
    for report in compile_all(targets)
]))
"""

_SM_90_SHARED_BYTES = 227 * 1024
_KERNEL_FILES = Path(__file__).parents[2] / "kernels" / "gpu"

Report = dict[str, int | str | bool]


def _run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = _run(_COMPILE, environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_kernel_of_the_package_is_compiled(reports: list[Report]) -> None:
    """A kernel is a jitted function named *_kernel; the report must not miss one."""
    names = {
        line.removeprefix("def ").split("(")[0]
        for path in _KERNEL_FILES.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert "decode_kernel" in names
    assert {report["kernel"] for report in reports} == names


def test_no_kernel_spills(reports: list[Report]) -> None:
    assert {report["name"]: report["local_bytes"] for report in reports} == {
        report["name"]: 0 for report in reports
    }
    assert all(0 < int(report["registers"]) <= 255 for report in reports)


def test_shared_memory_is_within_the_limit(reports: list[Report]) -> None:
    shared = {str(report["name"]): int(report["shared_bytes"]) for report in reports}
    assert max(shared.values()) <= _SM_90_SHARED_BYTES
    assert all(size > 0 for name, size in shared.items() if name.startswith("prefill_kernel")), (
        "K and V tiles pass through shared memory"
    )
    assert all(report["fits"] for report in reports)


def test_interpreted_kernels_are_refused() -> None:
    done = _run(_COMPILE, {**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode != 0
    assert "without TRITON_INTERPRET" in done.stderr
