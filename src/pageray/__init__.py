"""PageRay: LLM serving on Ray with KV-cache memory paged, shared and moved across the cluster.

Importing this package imports neither ray nor torch: the names below are loaded when they are
first used, since the processes that need the one should not pay for the other.
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pageray.cluster.sampling_params import SamplingParams
    from pageray.router.builder import (
        build_llm_deployment,
        build_openai_app,
        build_pd_openai_app,
    )
    from pageray.router.llm import LLM
    from pageray.router.llm_config import LLMConfig, LLMServingArgs, PDServingArgs

# OpenMP threads that wait for each other should spin for microseconds, then sleep. A server's other
# processes share the cores; when one of them takes a core, threads that keep spinning wait for a
# thread that cannot run, and a step takes up to ten times as long. Read once, when torch loads
# OpenMP; values set outside win.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "LLMConfig",
    "LLMServingArgs",
    "PDServingArgs",
    "SamplingParams",
    "__version__",
    "build_llm_deployment",
    "build_openai_app",
    "build_pd_openai_app",
]

_HOMES = {
    "LLM": "pageray.router.llm",
    "LLMConfig": "pageray.router.llm_config",
    "LLMServingArgs": "pageray.router.llm_config",
    "PDServingArgs": "pageray.router.llm_config",
    "SamplingParams": "pageray.cluster.sampling_params",
    "build_llm_deployment": "pageray.router.builder",
    "build_openai_app": "pageray.router.builder",
    "build_pd_openai_app": "pageray.router.builder",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return vars(importlib.import_module(home))[name]


def __dir__() -> list[str]:
    return sorted(__all__)
