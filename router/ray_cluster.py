"""The Ray cluster that `pageray serve` runs on: its own, or one it joins."""

import logging
import os
from collections.abc import Mapping

import ray
from ray import serve
from ray.serve.config import HTTPOptions, ProxyLocation
from ray.serve.schema import LoggingConfig

from pageray.cluster.errors import ServerError

LOOPBACK = "127.0.0.1"


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
        ray.init(
            address="local",
            include_dashboard=True,
            dashboard_host=LOOPBACK,
            _node_ip_address=LOOPBACK,
            logging_level=logging.ERROR,
        )

    def start_serve(self, http_options: Mapping[str, object], tree: Mapping[str, object]) -> None:
        """Start Serve's controller and proxy; a joined cluster's keep their own options."""
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(
            proxy_location=ProxyLocation(tree.get("proxy_location", ProxyLocation.EveryNode)),
            http_options=HTTPOptions.model_validate(http_options),
            logging_config=_logging_config(tree),
        )

    def run(self, targets: list[serve.RunTarget]) -> None:
        """Deploy applications and wait until all are running. Raises `ServerError` with the
        reason when one fails."""
        self._application_names = [target.name for target in targets]
        try:
            serve.run_many(targets)
        except RuntimeError as error:
            raise ServerError(
                " ".join(_why_failed(target.name) for target in targets)
                + " The whole story is in logs/serve of Ray's session folder."
            ) from error

    def stop(self) -> None:
        """End the applications, requests in flight first, and the cluster if it is our own."""
        if not ray.is_initialized():
            return
        try:
            # Not serve.shutdown: a joined cluster's Serve is not ours to end, and our own ends
            # with its cluster, without the lines Ray prints about a killed controller.
            for name in self._application_names:
                serve.delete(name)
        finally:
            ray.shutdown()


def _logging_config(tree: Mapping[str, object]) -> LoggingConfig | None:
    given = tree.get("logging_config")
    return None if given is None else LoggingConfig.model_validate(given)


def _why_failed(name: str) -> str:
    """Serve's own explanations of an application that did not come up, in few words."""
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
