import re

import pytest

from pageray.cluster.errors import ConfigError
from pageray.workers.ranks.cuda_budget import RESERVE_BYTES, DeviceUse, pool_budget_bytes

GIB = 1 << 30


def test_everything_that_was_measured_is_taken_off_once() -> None:
    use = DeviceUse(total=80 * GIB, free=60 * GIB, activations=3 * GIB, graphs=2 * GIB)
    assert pool_budget_bytes(use, 0.5) == (40 - 20 - 3 - 2) * GIB - RESERVE_BYTES


def test_nothing_left_says_what_took_it() -> None:
    use = DeviceUse(total=1000, free=600, activations=30, graphs=20)
    message = "has 1,000 bytes, gpu_memory_utilization allows 900, 400 are taken, a step needs 30"
    with pytest.raises(ConfigError, match=re.escape(message)):
        pool_budget_bytes(use, 0.9)
