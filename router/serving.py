"""From a started cluster to applications that answer."""

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

from pageray.router.readiness import wait_until_healthy
from pageray.router.serve_plan import ServePlan

if TYPE_CHECKING:
    from pageray.router.ray_cluster import RayCluster

_HEALTHY_TIMEOUT_S = 1800.0
"""Large models take minutes to load; a start that fails is noticed long before."""


def start_serving(
    cluster: "RayCluster", plan: ServePlan, models: "Sequence[Future[Path]]" = ()
) -> None:
    """Deploy every application of `plan` on a started cluster, and return when all answer.

    `models`: downloads that the engines wait for, when others have begun them.
    """
    cluster.start_serve(plan.http_options, plan.tree)

    from ray.serve import RunTarget

    from pageray.router.builder import build_openai_app, build_pd_openai_app
    from pageray.router.llm_config import PDServingArgs

    targets = [
        RunTarget(
            build_pd_openai_app(app.args)
            if isinstance(app.args, PDServingArgs)
            else build_openai_app(app.args),
            name=app.name,
            route_prefix=app.route_prefix,
        )
        for app in plan.applications
    ]
    for model in models:
        model.result()
    cluster.deploy(targets)
    for app in plan.applications:
        wait_until_healthy(
            plan.client_host,
            plan.port,
            app.route_prefix,
            _HEALTHY_TIMEOUT_S,
            cluster.check_deploying,
        )
