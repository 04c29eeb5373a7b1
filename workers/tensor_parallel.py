"""The collectives between the ranks of one engine.

A group is an object of its own: torch.distributed's process-wide default group is not touched, so
two engines fit in one process and a test can start as many groups as it likes.
"""

from datetime import timedelta
from typing import Protocol, cast

import torch
from torch import Tensor
from torch.distributed import (
    ProcessGroupGloo,
    Store,  # pyright: ignore[reportPrivateImportUsage]
    TCPStore,  # pyright: ignore[reportPrivateImportUsage]
    Work,
)

from pageray.cluster.errors import ConfigError, EngineDeadError
from pageray.kernels.ops import RankSums

DEFAULT_TIMEOUT_S = 300.0


class TensorParallelGroup(Protocol):
    """What a model shard needs of the other shards. All ranks make the same calls in order.

    A method raises `EngineDeadError` when a rank is gone or does not answer in time; the group is
    of no use after that.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> None:
        """x (contiguous, the same shape on every rank) becomes the sum over the ranks, in place."""
        ...

    def gather_columns(self, x_RW: Tensor, width_total: int) -> Tensor | None:
        """Rank 0 gets the ranks' x_RW side by side, cut to [R, width_total]; the others None."""
        ...

    def compiled_sums(self) -> RankSums | None:
        """`all_reduce` for code that cannot call Python; None if there is no other rank, or no such
        way to it."""
        ...

    def close(self) -> None:
        """Give up connections. Safe to call twice."""
        ...


class SingleRank:
    """The group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> None:
        pass

    def gather_columns(self, x_RW: Tensor, width_total: int) -> Tensor | None:
        return x_RW[:, :width_total]

    def compiled_sums(self) -> RankSums | None:
        return None

    def close(self) -> None:
        pass


class _Backend(Protocol):
    """The collectives of a torch.distributed backend, which torch's own stubs leave out."""

    def allreduce(self, tensors: list[Tensor]) -> Work: ...

    def gather(self, output: list[list[Tensor]], input: list[Tensor]) -> Work: ...

    def shutdown(self) -> None: ...


class TorchDistributedGroup:
    """Ranks in different processes: gloo for CPU tensors, NCCL for CUDA tensors.

    All ranks must construct their group at about the same time: construction waits for the others,
    at most `timeout_s`. `store` is where they find each other: see `serve_store` and `join_store`;
    a `torch.distributed.FileStore` on a path that all ranks see works too. A store serves one
    group. On CUDA, the current device must be `device`.
    """

    def __init__(
        self,
        *,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        if not 0 <= rank < size:
            raise ConfigError(f"rank is {rank}; a group of {size} has ranks 0 to {size - 1}.")
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        timeout = timedelta(seconds=timeout_s)
        store.set_timeout(timeout)
        try:
            self._backend = _open_backend(store, rank, size, device, timeout)
        except RuntimeError as error:
            raise self._broken("joining", error) from error

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: Tensor) -> None:
        try:
            self._backend.allreduce([x]).wait()
        except RuntimeError as error:
            raise self._broken("all_reduce", error) from error

    def gather_columns(self, x_RW: Tensor, width_total: int) -> Tensor | None:
        x_RW = x_RW.contiguous()
        parts = [torch.empty_like(x_RW) for _ in range(self._size)] if self._rank == 0 else []
        try:
            self._backend.gather([parts] if parts else [], [x_RW]).wait()
        except RuntimeError as error:
            raise self._broken("gather_columns", error) from error
        return torch.cat(parts, dim=1)[:, :width_total] if parts else None

    def compiled_sums(self) -> RankSums | None:
        return None

    def close(self) -> None:
        self._backend.shutdown()

    def _broken(self, action: str, error: RuntimeError) -> EngineDeadError:
        return EngineDeadError(
            f"{action}: rank {self._rank} of {self._size} lost the others, or waited "
            f"{self._timeout_s} s in vain: {error}"
        )


def _open_backend(
    store: Store, rank: int, size: int, device: torch.device, timeout: timedelta
) -> _Backend:
    if device.type == "cpu":
        return cast("_Backend", ProcessGroupGloo(store, rank, size, timeout))
    # Imported here because a CPU build of torch has no NCCL.
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # pyright: ignore[reportPrivateUsage]  # torch offers no other way
    return cast("_Backend", ProcessGroupNCCL(store, rank, size, options))


def serve_store(host: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """Rank 0's meeting point on a port that the system picks; read it from `.port`.

    It lives as long as the returned object. `host` is an address of this machine.
    """
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(host, 0, None, is_master=True, timeout=timeout, wait_for_workers=False)


def join_store(host: str, port: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> TCPStore:
    """The meeting point that rank 0 serves at `host`:`port`.

    Raises `EngineDeadError` when nobody answers there in time.
    """
    timeout = timedelta(seconds=timeout_s)
    try:
        return TCPStore(host, port, None, is_master=False, timeout=timeout)
    except RuntimeError as error:
        raise EngineDeadError(
            f"No rank 0 answers at {host}:{port} within {timeout_s} s: {error}"
        ) from error
