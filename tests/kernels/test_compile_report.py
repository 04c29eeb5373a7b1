"""Every GPU kernel compiles ahead of time, without a GPU, and fits the device."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

import pytest

# Runs in a process of its own: kernels of a process with TRITON_INTERPRET cannot be compiled.
_COMPILE = """
import json
import torch
from pageray.kernels.gpu.compile_report import compile_all
from pageray.kernels.gpu.compile_targets import GFX942, SM_90, SM_100, CompileTarget
from pageray.kernels.gpu.attention_variants import CAPPED, FP8_KV_CAPPED
from pageray.kernels.gpu.model_launches import GEMMA_3_12B, LLAMA_3_8B

plain = [
    CompileTarget(device=device, shape=LLAMA_3_8B, dtype=torch.bfloat16)
    for device in (SM_90, SM_100, GFX942)
]
variants = [
    CompileTarget(device=SM_90, shape=shape, dtype=torch.bfloat16, variant=variant)
    for shape, variant in ((LLAMA_3_8B, CAPPED), (GEMMA_3_12B, FP8_KV_CAPPED))
]
reports = compile_all(plain + variants)
print(json.dumps([
    {
        "kernel": report.kernel,
        "device": report.target.device.name,
        "registers": report.code.registers,
        "shared_bytes": report.shared_bytes,
        "local_bytes": report.code.local_bytes,
        "instructions": report.code.instructions,
        "fits": report.fits,
    }
    for report in reports
]))
"""

_COMPILE_HERE = """
import torch
from pageray.kernels.gpu.compile_report import compile_target
from pageray.kernels.gpu.compile_targets import SM_90, CompileTarget
from pageray.kernels.gpu.model_launches import LLAMA_3_8B

compile_target(CompileTarget(device=SM_90, shape=LLAMA_3_8B, dtype=torch.bfloat16))
"""

_SHARED_LIMIT_BYTES = {"sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
_KERNEL_FILES = Path(__file__).parents[2] / "kernels" / "gpu"


class Report(TypedDict):
    kernel: str
    device: str
    registers: int
    shared_bytes: int
    local_bytes: int
    instructions: list[str]
    fits: bool


def _run(code: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.fixture(scope="module")
def reports() -> list[Report]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = _run(_COMPILE, environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _instructions(reports: list[Report], kernel: str, device: str) -> set[str]:
    """Of all launches of the kernel, those that every one has."""
    first, *others = (
        set(report["instructions"])
        for report in reports
        if (report["kernel"], report["device"]) == (kernel, device)
    )
    return first.intersection(*others)


def test_every_kernel_of_the_package_is_compiled(reports: list[Report]) -> None:
    """A kernel is a jitted function named *_kernel; the report must not miss one."""
    names = {
        line.removeprefix("def ").split("(")[0]
        for path in _KERNEL_FILES.glob("*.py")
        for line in path.read_text().splitlines()
        if line.startswith("def ") and line.split("(")[0].endswith("_kernel")
    }
    assert "decode_kernel" in names
    for device in _SHARED_LIMIT_BYTES:
        assert {report["kernel"] for report in reports if report["device"] == device} == names


def test_no_kernel_spills(reports: list[Report]) -> None:
    assert [report for report in reports if report["local_bytes"]] == []
    # On gfx942 too: 512 threads are two waves on each SIMD, which has 512 registers a lane.
    assert all(0 < report["registers"] <= 256 for report in reports)


def test_shared_memory_is_within_the_limit(reports: list[Report]) -> None:
    for report in reports:
        assert report["shared_bytes"] <= _SHARED_LIMIT_BYTES[report["device"]], report
        if report["kernel"] == "prefill_kernel":
            assert report["shared_bytes"] > 0, "K and V tiles pass through shared memory"
        assert report["fits"]


def test_prefill_runs_on_the_matrix_units_of_its_generation(reports: list[Report]) -> None:
    """From 64 rows on; fewer, and Hopper and Blackwell fall back to Ampere's instruction."""
    units = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}
    for device, unit in units.items():
        assert unit in _instructions(reports, "prefill_kernel", device)
    assert "mma.sync" not in _instructions(reports, "prefill_kernel", "sm_90")


@pytest.mark.parametrize("device", ["sm_90", "sm_100"])
def test_decode_prefetches_whole_lines(reports: list[Report], device: str) -> None:
    """Without what the launch says of alignment the compiler copies two bytes at a time."""
    assert "cp.async 16 B" in _instructions(reports, "decode_kernel", device)


def test_interpreted_kernels_are_refused() -> None:
    done = _run(_COMPILE_HERE, {**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode != 0
    assert "without TRITON_INTERPRET" in done.stderr
