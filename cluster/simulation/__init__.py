"""A whole cluster in one thread and in simulated time.

Scheduler, block pool, page imports and exports, coordinator and placement are the real ones; only
executor, network and clock are made up (`cost_model.py`, `coordinator_port.py`, `event_loop.py`).
What stands around the real classes in production is rebuilt here in few lines: `engine_link.py`
is `ClusterLink`, `prefetch.py` and `pull.py` are `Prefetcher` and `Puller`, `router.py` is
`ClusterPlacer` with `Resuming`. Equal seeds give equal runs.
"""
