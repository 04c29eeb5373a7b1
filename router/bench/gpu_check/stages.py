"""The parts of the check. Each runs in a process of its own: after a kernel has touched memory
that is not its own, the CUDA context of that process is of no use for anything."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args

import torch
from tqdm import tqdm

from pageray.cluster.errors import ConfigError
from pageray.router.bench.gpu_check.accuracy import check_accuracy, num_checks
from pageray.router.bench.gpu_check.attention_timing import points, time_attention
from pageray.router.bench.gpu_check.bench_device import BenchDevice
from pageray.router.bench.gpu_check.chip import describe_chip
from pageray.router.bench.gpu_check.findings import Findings, StageName
from pageray.router.bench.gpu_check.kernel_timing import num_timings, time_kernels
from pageray.router.bench.gpu_check.serving import measure_serving, num_runs
from pageray.workers.model_store.resolve import resolve_model

STAGES: tuple[StageName, ...] = get_args(StageName)

GPU_TESTS = ("tests/kernels", "tests/workers/test_engine_gpu.py")
"""Where tests with the marker `gpu` are. The others need not even be importable: a GPU machine
without network may have no Ray."""

PYTEST = (sys.executable, "-P", "-m", "pytest", "-m", "gpu", "-q", *GPU_TESTS)
"""The stage "tests" is pytest itself, in the repository's root."""

_PROGRESS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    device: str
    is_quick: bool
    model: str


def parse_stages(text: str) -> tuple[StageName, ...]:
    """Comma-separated names, in the order in which they run. Raises `ConfigError`."""
    wanted = text.split(",")
    for name in wanted:
        if name not in STAGES:
            raise ConfigError(f"There is no stage {name!r}; the stages are {', '.join(STAGES)}.")
    return tuple(stage for stage in STAGES if stage in wanted)


def run_stage(name: StageName, options: CheckOptions) -> Findings:
    """Measure in this process. "tests" is not run this way: it is `PYTEST`."""
    bench = BenchDevice.of(torch.device(options.device), options.is_quick)
    match name:
        case "chip":
            return Findings(chip=describe_chip(bench))
        case "accuracy":
            with _bar(name, num_checks(bench.is_quick)) as bar:
                return Findings(accuracy=tuple(check_accuracy(bench, bar.update)))
        case "kernels":
            with _bar(name, num_timings(bench.is_quick)) as bar:
                return Findings(kernels=tuple(time_kernels(bench, bar.update)))
        case "attention":
            with _bar(name, len(list(points(bench.is_quick)))) as bar:
                return Findings(attention=tuple(time_attention(bench, bar.update)))
        case "serving":
            settings = serving_settings(options)
            with _bar(name, num_runs(bench.is_quick)) as bar:
                return Findings(
                    serving=tuple(measure_serving(settings, bench.is_quick, bar.update))
                )
        case "tests":
            raise ConfigError("The stage tests is pytest; run `pytest -m gpu` for it alone.")


def serving_settings(options: CheckOptions) -> dict[str, object]:
    """The folder is found first, so that a model that cannot be had is the first thing to fail."""
    settings: dict[str, object] = {
        "model": str(resolve_model(options.model)),
        "device": options.device,
        "enable_prefix_caching": False,
    }
    if options.is_quick:
        settings |= {"num_gpu_blocks_override": 16, "max_num_seqs": 4}
    return settings


def stage_command(name: StageName, options: CheckOptions, part: Path) -> Sequence[str]:
    """What the parent starts for a stage; it leaves its findings in the file `part`."""
    if name == "tests":
        return PYTEST
    command = [sys.executable, "-P", "-m", "pageray.router.cli", "bench", "gpu"]
    command += ["--device", options.device, "--model", options.model]
    command += ["--only", name, "--json", str(part)]
    return [*command, "--quick"] if options.is_quick else command


def _bar(name: StageName, total: int) -> "tqdm[NoReturn]":
    # A line now and then: the parent passes on lines, to a terminal or to a log.
    return tqdm(total=total, desc=name, unit="row", mininterval=_PROGRESS_S, ncols=70)
