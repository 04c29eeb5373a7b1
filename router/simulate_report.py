"""What `pageray simulate` found out: one row per policy."""

from dataclasses import dataclass

import msgspec

from pageray.cluster.simulation.policies import POLICIES
from pageray.cluster.simulation.simulation import SimulationResult, SimulationSettings
from pageray.router.bench.summary import Summary, summarize


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Rates are shares from 0 to 1."""

    policy: str
    engines: int
    requests: int
    prompt_tokens: int
    hit_rate: float
    """Share of all prompt tokens that came from a cache, local or pulled."""
    optimal_hit_rate: float
    """The same for one endless cache that all share, filled in order of arrival."""
    ttft_ms: Summary
    imbalance: float
    """Tokens computed (prompt and output) by the engine that computed most, over the mean."""
    bytes_moved: int
    computed_prefill_tokens: int
    """Recomputation after a preemption included."""
    optimal_prefill_tokens: int
    preemptions: int
    failed_pulls: int


@dataclass(frozen=True, kw_only=True)
class Report:
    workload: str
    speed: float
    seed: int
    max_output: int | None
    settings: SimulationSettings
    """Of all rows, but for the policy."""
    rows: list[Row]

    def encode(self) -> bytes:
        """JSON: equal runs give equal bytes."""
        return msgspec.json.encode(
            {
                "workload": self.workload,
                "speed": self.speed,
                "seed": self.seed,
                "max_output": self.max_output,
                "cost_model": self.settings.cost,
                "engine": self.settings.engine,
                "rows": self.rows,
            }
        )


def row_of(settings: SimulationSettings, result: SimulationResult, num_optimal_hits: int) -> Row:
    """`num_optimal_hits`: prompt tokens, see `optimal_hit_tokens`."""
    num_prompt = sum(run.num_prompt_tokens for run in result.runs)
    num_cached = sum(run.num_cached_tokens for run in result.runs)
    tallies = result.tallies.values()
    computed = [tally.num_computed_tokens for tally in tallies]
    waits_ms = [
        1e3 * (run.first_token_s - run.arrived_s)
        for run in result.runs
        if run.first_token_s is not None
    ]
    return Row(
        policy=settings.policy,
        engines=settings.num_engines,
        requests=len(result.runs),
        prompt_tokens=num_prompt,
        hit_rate=round(num_cached / num_prompt, 4),
        optimal_hit_rate=round(num_optimal_hits / num_prompt, 4),
        ttft_ms={name: round(value, 1) for name, value in summarize(waits_ms).items()},
        imbalance=round(max(computed) * len(computed) / sum(computed), 3),
        bytes_moved=sum(tally.num_pulled_bytes for tally in tallies),
        computed_prefill_tokens=sum(tally.num_prompt_tokens for tally in tallies),
        optimal_prefill_tokens=num_prompt - num_optimal_hits,
        preemptions=sum(tally.num_preemptions for tally in tallies),
        failed_pulls=sum(tally.num_failed_pulls for tally in tallies),
    )


def print_report(report: Report) -> None:
    from rich.console import Console
    from rich.table import Table

    first = report.rows[0]
    table = Table(
        title=f"{report.workload}: {first.requests:,} requests, {first.engines} simulated engines",
        caption=f"An endless cache shared by all would serve {first.optimal_hit_rate:.1%}.",
    )
    for name in ("policy", "hit rate", "first token p50, p90, p99, ms", "imbalance", "moved, GB"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for row in report.rows:
        ttft = ", ".join(f"{row.ttft_ms[name]:,.0f}" for name in ("p50", "p90", "p99"))
        table.add_row(
            f"{row.policy} ({POLICIES[row.policy].description})",
            f"{row.hit_rate:.1%}",
            ttft,
            f"{row.imbalance:.2f}",
            f"{row.bytes_moved / 1e9:,.1f}",
        )
    Console().print(table)
