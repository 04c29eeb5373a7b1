"""The same loads on two engines in turns: who gives more tokens a second, and how near the limit."""

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from pageray.router.bench.machine_limits import MachineLimits
from pageray.router.bench.peer_process import PeerProcess


@dataclass(frozen=True)
class Workload:
    """`num_requests` at once, each `input_len` random tokens of which the first `shared_len` are
    the same in all, continued by `output_len`."""

    num_requests: int
    input_len: int
    output_len: int
    shared_len: int = 0

    @property
    def name(self) -> str:
        shared = f" ({self.shared_len} shared)" if self.shared_len else ""
        plural = "" if self.num_requests == 1 else "s"
        return f"{self.num_requests} request{plural}, {self.input_len} in{shared}, {self.output_len} out"

    def prompts(self, seed: int, vocab_size: int) -> list[list[int]]:
        rng = random.Random(seed)
        shared = [rng.randrange(vocab_size) for _ in range(self.shared_len)]
        own = self.input_len - self.shared_len
        return [
            shared + [rng.randrange(vocab_size) for _ in range(own)]
            for _ in range(self.num_requests)
        ]


WORKLOADS = (
    Workload(1, 32, 64),
    Workload(8, 64, 64),
    Workload(32, 128, 64),
    Workload(32, 512, 32),
    Workload(32, 512, 32, shared_len=448),
)


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """What a token costs at least. Of SmolLM2-135M: 134.5 million weights, of which the 28.3 million
    of the embedding are used as LM head only where logits are asked for."""

    weight_bytes: float
    decode_flop: float
    """Per token whose logits are computed."""
    prefill_flop: float
    """Per token without logits."""
    kv_bytes_per_token: float


def limit_tokens_per_s(load: Workload, costs: ModelCosts, machine: MachineLimits) -> float:
    """Output tokens per second that this machine could give: weights read once per step or their
    arithmetic, whichever takes longer, and each step's KV; a shared prefix is read and computed
    once. Attention's own arithmetic is left out."""
    num_prefill = load.num_requests * (load.input_len - load.shared_len) + load.shared_len
    seconds = num_prefill * costs.prefill_flop / machine.flop_per_s
    for position in range(load.output_len):
        compute_s = load.num_requests * costs.decode_flop / machine.flop_per_s
        read_s = costs.weight_bytes / machine.read_bytes_per_s
        own = load.input_len - load.shared_len + position
        context = load.num_requests * own + load.shared_len
        kv_s = context * costs.kv_bytes_per_token / machine.read_bytes_per_s
        seconds += max(compute_s, read_s) + kv_s
    return load.num_requests * load.output_len / seconds


@dataclass(frozen=True, kw_only=True)
class ComparedRow:
    workload: str
    ours: float
    """Output tokens per second, median over the rounds."""
    peer: float
    ratio: float
    share_of_limit: float


def compare(
    ours: PeerProcess,
    peer: PeerProcess,
    *,
    rounds: int,
    vocab_size: int,
    limit_of: Callable[[Workload], float],
    on_run: Callable[[], object],
) -> list[ComparedRow]:
    """Each load `rounds` times on each, in turns; every round has prompts of its own, so that no
    prefix cache helps but within a round. One round before them is not counted."""
    rows: list[ComparedRow] = []
    for load in WORKLOADS:
        rates: dict[PeerProcess, list[float]] = {ours: [], peer: []}
        for number in range(rounds + 1):
            prompts = load.prompts(seed=1000 * load.num_requests + number, vocab_size=vocab_size)
            order = (ours, peer) if number % 2 else (peer, ours)
            for side in order:
                rate = side.run(prompts, load.output_len)
                on_run()
                if number > 0:
                    rates[side].append(rate)
        our_rate, peer_rate = statistics.median(rates[ours]), statistics.median(rates[peer])
        rows.append(
            ComparedRow(
                workload=load.name,
                ours=our_rate,
                peer=peer_rate,
                ratio=our_rate / peer_rate,
                share_of_limit=our_rate / limit_of(load),
            )
        )
    return rows
