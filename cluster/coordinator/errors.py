"""What a caller of the coordinator may have to catch."""

from pageray.cluster.errors import PageRayError


class CoordinatorUnavailableError(PageRayError):
    """The coordinator gave no answer in time. Go on without it: engines serve and share locally,
    routers place by load."""
