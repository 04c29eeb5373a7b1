"""The Ray cluster that `pageray serve` runs on: its own, or one it joins.

`ray.serve` is imported inside the methods that need it: it takes a second, which `start` spends
waiting for other processes.
"""

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

# Before Ray is imported. Ray starts its dashboard first and then waits seconds for it with all
# else undone; without the wait it comes up while the rest starts.
os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", "0")
# Ray runs workers at niceness 15, below its own dashboard. Here the workers do the work.
os.environ.setdefault("RAY_worker_niceness", "0")
# Serve's logs go to its files; what our own code logs still reaches this terminal.
os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")

import ray

from pageray.cluster.errors import ServerError

if TYPE_CHECKING:
    from ray.serve import RunTarget
    from ray.serve.schema import LoggingConfig

LOOPBACK = "127.0.0.1"
SERVE_LOGS = "/tmp/ray/session_latest/logs/serve"


class RayCluster:
    """Started by `start`, ended by `stop`, which leaves a joined cluster and whatever else runs
    there as it was."""

    def __init__(self) -> None:
        self._is_own = os.environ.get("RAY_ADDRESS") is None
        self._application_names: list[str] = []

    @property
    def is_own(self) -> bool:
        """False when RAY_ADDRESS names a cluster to join."""
        return self._is_own

    def start(self) -> None:
        """Start Ray on the loopback interface, dashboard included, or join the cluster."""
        if not self._is_own:
            ray.init(logging_level=logging.ERROR)
            return
        # Having been told not to wait, Ray says that the dashboard failed, which is not so.
        services = logging.getLogger("ray._private.services")
        services.setLevel(logging.CRITICAL)
        ray.init(
            address="local",
            dashboard_host=LOOPBACK,
            _node_ip_address=LOOPBACK,
            logging_level=logging.ERROR,
        )
        services.setLevel(logging.NOTSET)

    def start_serve(self, http_options: Mapping[str, object], tree: Mapping[str, object]) -> None:
        """Start Serve's controller and proxy; a joined cluster's keep their own options."""
        from ray import serve
        from ray.serve.config import HTTPOptions, ProxyLocation

        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location=ProxyLocation(tree.get("proxy_location", ProxyLocation.EveryNode)),
            http_options=HTTPOptions.model_validate(http_options),
            logging_config=_logging_config(tree),
        )

    def deploy(self, targets: "list[RunTarget]") -> None:
        """Begin to deploy applications; `check_deploying` tells how it goes."""
        from ray import serve

        self._application_names = [target.name for target in targets]
        serve.run_many(targets, wait_for_applications_running=False)

    def check_deploying(self) -> None:
        """Raise `ServerError` with Serve's reason if an application could not be deployed."""
        from ray import serve
        from ray.serve.schema import ApplicationStatus

        applications = serve.status().applications
        failed = [
            name
            for name in self._application_names
            if name not in applications
            or applications[name].status is ApplicationStatus.DEPLOY_FAILED
        ]
        if failed:
            reasons = " ".join(_why_failed(name) for name in failed)
            raise ServerError(f"{reasons} More in {SERVE_LOGS}.")

    def stop(self) -> None:
        """End the applications, requests in flight first, and the cluster if it is our own."""
        if not ray.is_initialized():
            return
        from ray import serve

        try:
            # Not serve.shutdown: a joined cluster's Serve is not ours to end, and our own ends
            # with its cluster, without the lines Ray prints about a killed controller.
            for name in self._application_names:
                serve.delete(name)
        finally:
            ray.shutdown()


def _logging_config(tree: Mapping[str, object]) -> "LoggingConfig | None":
    from ray.serve.schema import LoggingConfig

    given = tree.get("logging_config")
    return None if given is None else LoggingConfig.model_validate(given)


def _why_failed(name: str) -> str:
    """Serve's own explanations of an application that did not come up, in few words."""
    from ray import serve

    application = serve.status().applications.get(name)
    if application is None:
        return f"Application {name!r} was not deployed."
    reasons = [
        f"{deployment}: {message.strip().splitlines()[-1]}"
        for deployment, status in application.deployments.items()
        if (message := status.message).strip()
    ]
    return f"Application {name!r} could not be started. " + " ".join(
        reasons or [application.message]
    )
