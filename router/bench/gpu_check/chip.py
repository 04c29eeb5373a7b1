"""Which GPU this is, and what it does at best: a copy, and a matrix product."""

import re
import shutil
import subprocess
from importlib.metadata import version

import torch
from torch.nn import functional

from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.clock import median_call_s
from pageray.router.bench.gpu_check.findings import Chip
from pageray.router.bench.machine import describe_machine

_MATMUL_SIZE = 8192
_QUICK_MATMUL_SIZE = 64
_COPY_SHARE = 16
_MAX_COPY_BYTES = 4 << 30


@torch.inference_mode()
def describe_chip(bench: BenchDevice) -> Chip:
    is_cuda = bench.device.type == "cuda"
    dtype = torch.bfloat16 if is_cuda else torch.float32
    return Chip(
        name=torch.cuda.get_device_name(bench.device)
        if is_cuda
        else str(describe_machine()["cpu"]),
        driver=_driver() if is_cuda else "none",
        cuda=torch.version.cuda or "none",
        torch=str(torch.__version__),
        triton=version("triton"),
        memory_bytes=bench.memory_bytes,
        l2_bytes=bench.l2_bytes,
        copy_bytes_per_s=_copy_bytes_per_s(bench),
        matmul_flop_per_s=_matmul_flop_per_s(bench, dtype),
        matmul_dtype=str(dtype).removeprefix("torch."),
    )


def slug(name: str) -> str:
    """A chip's name as part of a file's name: "NVIDIA H100 80GB" is "nvidia-h100-80gb"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _copy_bytes_per_s(bench: BenchDevice) -> float:
    num_bytes = min(_MAX_COPY_BYTES, bench.memory_bytes // _COPY_SHARE)
    source = torch.ones(num_bytes, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    return 2 * num_bytes / median_call_s(bench.clock, work, 1, bench.num_rounds)


def _matmul_flop_per_s(bench: BenchDevice, dtype: torch.dtype) -> float:
    """Of random numbers: products of zeros draw less power and run faster."""
    size = _QUICK_MATMUL_SIZE if bench.is_quick else _MATMUL_SIZE
    generator = torch.Generator(bench.device).manual_seed(0)
    x, weight = torch.randn(
        (2, size, size), dtype=dtype, device=bench.device, generator=generator
    ).unbind(0)

    def work() -> None:
        functional.linear(x, weight)

    return 2.0 * size**3 / median_call_s(bench.clock, work, 1, bench.num_rounds)


def _driver() -> str:
    """As nvidia-smi says; "unknown" in containers that come without it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    lines = result.stdout.splitlines()
    return lines[0].strip() if result.returncode == 0 and lines else "unknown"
