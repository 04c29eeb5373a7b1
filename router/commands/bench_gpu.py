"""`pageray bench gpu`: whether every kernel is right on this GPU, how fast, and a model on it."""

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.cluster.errors import ConfigError
from pageray.router.commands.subparsers import Subparsers

if TYPE_CHECKING:
    from pageray.router.bench.gpu_check.findings import Findings
    from pageray.router.bench.gpu_check.stages import CheckOptions

NO_GPU = 3
"""Exit status where there is no CUDA device; 1 says that a stage failed."""

RESULTS = Path("benchmarks/results")


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser("gpu", help="check and time every kernel on a CUDA device")
    parser.description = __doc__
    parser.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    parser.add_argument("--model", default="smollm2-135m", help="folder, hub id or embedded name")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="tiny shapes: tries the check itself")
    parser.add_argument("--stages", metavar="A,B", help="only these, comma-separated")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the report goes")
    parser.add_argument("--only", metavar="STAGE", help="run one stage in this process ...")
    parser.add_argument("--json", type=Path, metavar="FILE", help="... and leave its findings here")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import torch

    from pageray.router.bench.gpu_check.run_stages import run_stages
    from pageray.router.bench.gpu_check.stages import STAGES, CheckOptions, parse_stages

    is_dry_run = arguments.device == "cpu" or arguments.quick
    if is_dry_run and arguments.out is None and arguments.only is None:
        raise ConfigError(
            "--device cpu and --quick try the check itself; its figures do not belong into "
            f"{RESULTS}. Say with --out where they go."
        )
    if arguments.device == "cuda" and not torch.cuda.is_available():
        print("pageray: no CUDA device is visible to torch; nothing was run.", file=sys.stderr)
        return NO_GPU
    options = CheckOptions(device=arguments.device, is_quick=arguments.quick, model=arguments.model)
    if arguments.only is not None:
        return _run_only(arguments, options)
    names = STAGES if arguments.stages is None else parse_stages(arguments.stages)
    findings = run_stages(names, options, lambda line: print(line, flush=True))
    page = _write(findings, arguments.out or RESULTS, is_dry_run)
    print(page)
    return 1 if any(stage.status == "failed" for stage in findings.stages) else 0


def _run_only(arguments: argparse.Namespace, options: "CheckOptions") -> int:
    import msgspec

    from pageray.router.bench.gpu_check.stages import parse_stages, run_stage

    (name,) = parse_stages(arguments.only)
    encoded = msgspec.json.format(msgspec.json.encode(run_stage(name, options)))
    if arguments.json is None:
        print(encoded.decode())
    else:
        arguments.json.write_bytes(encoded)
    return 0


def _write(findings: "Findings", folder: Path, is_dry_run: bool) -> Path:
    """The page and, in `json/` beside it, the findings. Returns the page's path."""
    import msgspec

    from pageray.router.bench.gpu_check.chip import slug
    from pageray.router.bench.gpu_check.report import markdown

    name = (
        "dry-run"
        if is_dry_run
        else f"gpu-{slug(findings.chip.name if findings.chip else 'unknown')}"
    )
    data, page = folder / "json" / f"{name}.json", folder / f"{name}.md"
    data.parent.mkdir(parents=True, exist_ok=True)
    data.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")
    command = shlex.join(["pageray", *sys.argv[1:]])
    page.write_text(markdown(findings, command, is_dry_run), encoding="utf-8")
    return page
