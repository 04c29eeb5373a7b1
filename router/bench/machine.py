"""What a benchmark ran on: a figure without it means nothing."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import pageray

Machine = dict[str, str | int]


def describe_machine() -> Machine:
    """Processor, cores this process may use, memory in GiB, and the versions that matter."""
    return {
        "cpu": _cpu_model(),
        "instruction_sets": ", ".join(_instruction_sets()) or "unknown",
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30,
        "python": platform.python_version(),
        "torch": version("torch"),
        "numba": version("numba"),
        "pageray": pageray.__version__,
    }


def _cpu_lines(name: str) -> list[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    return [line.partition(":")[2].strip() for line in lines if line.startswith(name)]


def _cpu_model() -> str:
    models = _cpu_lines("model name")
    return models[0] if models else platform.processor() or platform.machine()


def _instruction_sets() -> list[str]:
    flags = set(_cpu_lines("flags")[0].split()) if _cpu_lines("flags") else set[str]()
    return [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags]
