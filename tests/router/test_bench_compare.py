"""The comparison with peers: fair loads, and a limit that nothing can exceed."""

import sys
from pathlib import Path

import pytest

from pageray.cluster.errors import ConfigError
from pageray.router.bench.compare_bench import (
    WORKLOADS,
    ModelCosts,
    Workload,
    compare,
    limit_tokens_per_s,
)
from pageray.router.bench.machine_limits import MachineLimits
from pageray.router.bench.peer_process import PeerProcess

COSTS = ModelCosts(
    weight_bytes=269e6, decode_flop=269e6, prefill_flop=212e6, kv_bytes_per_token=23040.0
)
MACHINE = MachineLimits(read_bytes_per_s=32e9, flop_per_s=410e9)

FAKE_PEER = """
import json, sys
print(json.dumps({"ready_s": 0.5}), flush=True)
speed = json.loads(sys.stdin.readline())["speed"]
for line in sys.stdin:
    load = json.loads(line)
    count = len(load["prompts"]) * load["output_len"]
    print(json.dumps({"num_tokens": count, "seconds": count / speed}), flush=True)
"""


def fake_peer(folder: Path, speed: float, text: str = FAKE_PEER) -> PeerProcess:
    script = folder / f"peer{speed:.0f}.py"
    script.write_text(text)
    return PeerProcess(sys.executable, script, {"speed": speed}, {})


def test_rates_and_ratios(tmp_path: Path) -> None:
    ours, peer = fake_peer(tmp_path, 300.0), fake_peer(tmp_path, 100.0)
    runs: list[int] = []
    rows = compare(
        ours,
        peer,
        rounds=2,
        vocab_size=100,
        limit_of=lambda load: 600.0,
        on_run=lambda: runs.append(1),
    )
    ours.close()
    peer.close()
    assert [row.workload for row in rows] == [load.name for load in WORKLOADS]
    for row in rows:
        assert (row.ours, row.peer) == (pytest.approx(300.0), pytest.approx(100.0))
        assert (row.ratio, row.share_of_limit) == (pytest.approx(3.0), pytest.approx(0.5))
    assert len(runs) == len(WORKLOADS) * 2 * 3


def test_a_peer_that_fails_or_cheats_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ended with status 3"):
        fake_peer(tmp_path, 1.0, "import sys; sys.exit(3)")
    cheat = fake_peer(tmp_path, 2.0, FAKE_PEER.replace('"num_tokens": count', '"num_tokens": 1'))
    with pytest.raises(ConfigError, match="gave 1 tokens, 8 were asked for"):
        cheat.run([[1, 2]], 8)
    cheat.close()


def test_prompts_are_as_long_and_as_shared_as_they_say() -> None:
    load = Workload(3, 10, 4, shared_len=6)
    first, second, third = load.prompts(seed=1, vocab_size=1000)
    assert len(first) == len(second) == len(third) == 10
    assert first[:6] == second[:6] == third[:6]
    assert first[6:] != second[6:]
    assert load.prompts(seed=2, vocab_size=1000)[0][:6] != first[:6]


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        # One request reads all weights for each token: 32e9 / 269e6 = 119, and a little KV.
        (Workload(1, 32, 64), 117),
        # 32 requests compute 32 x 269 MFLOP for each step: 410e9 / 269e6 = 1524 without prefill.
        (Workload(32, 128, 64), 558),
    ],
)
def test_the_limit(load: Workload, expected: float) -> None:
    assert limit_tokens_per_s(load, COSTS, MACHINE) == pytest.approx(expected, rel=0.05)
