"""The ways to choose an engine that `pageray bench routing` compares."""

from dataclasses import dataclass

_ROUTER = "deployment_config.request_router_config"
_ALONE = "share_pages=false"


@dataclass(frozen=True)
class RoutingPolicy:
    name: str
    settings: tuple[str, ...]
    """As under `--set` of `pageray serve`: what makes an application follow the policy."""
    has_coordinator: bool = False
    """Whether its engines tell a coordinator what they hold."""


ROUND_ROBIN = RoutingPolicy(
    "round robin",
    (
        _ALONE,
        f"{_ROUTER}.request_router_class=ray.serve.experimental.round_robin_router:RoundRobinRouter",
    ),
)
POWER_OF_TWO = RoutingPolicy(
    "power of two",
    # Ray's default is what it takes when nothing is named.
    (_ALONE, f"{_ROUTER}={{}}"),
)
PREFIX_AFFINITY = RoutingPolicy(
    "Ray's prefix",
    (
        _ALONE,
        f"{_ROUTER}.request_router_class=pageray.router.bench.token_prefix_router:TokenPrefixRouter",
    ),
)
ROUTE_ONLY = RoutingPolicy("route only", ("move_pages=false",), has_coordinator=True)
ROUTE_OR_MOVE = RoutingPolicy("route or move", (), has_coordinator=True)


def available_policies() -> tuple[list[RoutingPolicy], dict[str, str]]:
    """Those that can run here, and why the others cannot, by name."""
    policies = [ROUND_ROBIN, POWER_OF_TWO, PREFIX_AFFINITY, ROUTE_ONLY, ROUTE_OR_MOVE]
    reason = _why_no_prefix_affinity()
    if reason is None:
        return policies, {}
    policies.remove(PREFIX_AFFINITY)
    return policies, {PREFIX_AFFINITY.name: reason}


def _why_no_prefix_affinity() -> str | None:
    """It is no public part of Ray: another version may have moved it or want more installed."""
    try:
        from pageray.router.bench import token_prefix_router
    except ImportError as error:
        return f"Ray's router cannot be imported: {error}"
    del token_prefix_router
    return None
