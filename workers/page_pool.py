"""The memory of one rank's pages: one allocation, block-major.

`[num_blocks + 1, num_layers, 2 (K, V), num_kv_heads, block_size, head_dim]`; block 0 is the null
block. One block is one contiguous record, so a copy, a transfer and a checksum each touch one run
of bytes; one layer of all blocks is a strided view.

On CPU the bytes are a memfd that other processes of the host may map (by `share_path`), so that
they can write pages straight into it; the kernel frees it with its last holder. Every page of
memory is touched at the start: a first touch during a step costs twenty times a later one.
"""

import mmap
import os
from pathlib import Path

import torch
from torch import Tensor

from pageray.cluster.errors import ConfigError
from pageray.cluster.memory_plan import PageLayout

SPARE_BYTES = 256 << 20
"""Memory left to everybody else when a pool is taken from the host."""


class PagePool:
    """One rank's pages as a tensor, and the file behind it on CPU."""

    def __init__(self, tensor: Tensor, memfd: int | None) -> None:
        self.tensor = tensor
        self._memfd = memfd

    @classmethod
    def allocate(
        cls, layout: PageLayout, num_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> "PagePool":
        """A zeroed pool of `num_blocks` usable blocks and the null block.

        Raises `ConfigError` with the byte counts when the host has not that much memory.
        """
        shape = (
            num_blocks + 1,
            layout.num_layers,
            2,
            layout.num_kv_heads,
            layout.block_size,
            layout.head_dim,
        )
        if device.type != "cpu":
            return cls(torch.zeros(shape, dtype=dtype, device=device), None)
        num_bytes = (num_blocks + 1) * layout.page_bytes
        available = available_host_bytes()
        if available is not None and num_bytes + SPARE_BYTES > available:
            raise ConfigError(
                f"The KV pool needs {num_bytes:,} bytes ({num_blocks} blocks), but the host has "
                f"{available:,} bytes free and {SPARE_BYTES:,} must be left. Lower "
                "kv_cache_memory_bytes or num_gpu_blocks_override."
            )
        memfd = os.memfd_create("pageray-pool", os.MFD_CLOEXEC)
        os.ftruncate(memfd, num_bytes)
        # The tensor keeps the mapping alive, and the mapping the memory.
        mapping = mmap.mmap(memfd, num_bytes)
        tensor = torch.frombuffer(mapping, dtype=dtype).view(shape)
        tensor.zero_()
        return cls(tensor, memfd)

    @property
    def share_path(self) -> str | None:
        """Where another process of this host and user can open the pool's bytes; None on CUDA."""
        return None if self._memfd is None else f"/proc/{os.getpid()}/fd/{self._memfd}"

    def close(self) -> None:
        if self._memfd is not None:
            os.close(self._memfd)
            self._memfd = None


def available_host_bytes() -> int | None:
    """Memory the host could give without swapping, in bytes; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None
