"""NIXL beyond what `test_delivery.py` shows of every transport."""

import importlib.util
from collections.abc import Callable

import pytest

from pageray.cluster.errors import ConfigError
from pageray.cluster.ids import BlockId, TransferId
from pageray.workers.transfer.nixl_pools import NixlPools
from pageray.workers.transfer.page_write import PageWrite
from pageray.workers.transfer.page_writer import TransferError
from transfer_jobs import (
    HAS_NIXL,
    NUM_BLOCKS,
    Destination,
    SharedPools,
    Source,
    WriteJob,
    assert_delivered,
    layout_of,
)

MakeDestination = Callable[..., Destination]


@pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is not None, reason="nixl-cu12 is installed"
)
def test_without_the_package_it_says_what_to_install() -> None:
    pools = SharedPools(layout_of(1))
    with pytest.raises(ConfigError, match="nixl-cu12"):
        NixlPools(pools.pages, "engine-1")
    pools.close()


@pytest.mark.skipif(not HAS_NIXL, reason="nixl-cu12 is not installed")
def test_page_outside_the_pool_is_an_error(
    source: Source, make_destination: MakeDestination
) -> None:
    destination = make_destination("nixl", layout_of(1))
    job = WriteJob(
        endpoint=destination.endpoint(),
        source_layout=layout_of(1),
        transfer_id=TransferId(1),
        writes=[PageWrite(0, BlockId(1), BlockId(NUM_BLOCKS + 1))],
    )
    with pytest.raises(TransferError, match=f"ValueError: block {NUM_BLOCKS + 1} is not one of"):
        source.write(job)
    assert_delivered(destination.pages, [])
