"""`pageray bench routing`: its loads, its optimum, its figures, and Ray's router fed by it."""

import asyncio
import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from xml.etree import ElementTree

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from ray import serve
from ray.actor import ActorHandle

import scripted_engine
from pageray.cluster.errors import ConfigError
from pageray.router.bench.mooncake_trace import TraceScale, read_trace, trace_load
from pageray.router.bench.prefix_optimum import least_prefill_tokens
from pageray.router.bench.routing_bench import RoutingRow, routing_row
from pageray.router.bench.routing_chart import draw_rows
from pageray.router.bench.routing_client import Answer, RoutingClient
from pageray.router.bench.routing_load import RoutingLoad, RoutingRequest, SharedPrefixes
from pageray.router.bench.routing_policies import PREFIX_AFFINITY, available_policies
from pageray.router.bench.routing_testbed import EngineCounts
from pageray.router.bench.token_prefix_router import text_of
from pageray.router.builder import build_application, deployment_name
from pageray.router.cli import main
from pageray.router.config_file import Override, apply_override
from pageray.router.http_port import free_port
from pageray.router.llm_config import parse_pd_serving_args, parse_serving_args
from scripted_engine import start_paced_engine

PREFIXES = SharedPrefixes(
    num_requests=300, num_groups=4, prefix_len=32, max_tail_len=8, output_len=8, seed=3
)


def test_shared_prefixes_are_skewed_and_tails_are_not_shared() -> None:
    load = PREFIXES.load()
    assert load == PREFIXES.load()
    groups = Counter(prompt[:32] for prompt in load.prompts)
    assert len(groups) == 4
    # In proportion to 1, 1/2, 1/3 and 1/4: 144, 72, 48 and 36 of 300.
    counts = sorted(groups.values(), reverse=True)
    assert 110 < counts[0] < 180
    assert 20 < counts[-1] < 60
    assert {len(prompt) for prompt in load.prompts} == set(range(33, 41))
    long_tails = [prompt[32:] for prompt in load.prompts if len(prompt) > 36]
    assert len(set(long_tails)) == len(long_tails)


def test_arrivals_are_a_poisson_process_of_the_rate_asked_for() -> None:
    arrivals = [request.arrival_s for request in PREFIXES.load().at_rate(5.0).requests]
    assert arrivals[0] == 0.0
    assert arrivals[-1] == pytest.approx(299 / 5.0)
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert min(gaps) >= 0.0
    # Of exponential gaps 1 - 1/e are shorter than the mean.
    assert sum(gap < 0.2 for gap in gaps) / 299 == pytest.approx(1 - math.exp(-1), abs=0.08)


def _trace(tmp_path: Path, rows: list[tuple[int, int, list[int]]]) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        json.dumps(
            {"timestamp": stamp, "input_length": length, "output_length": 5, "hash_ids": ids}
        )
        for stamp, length, ids in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


SCALE = TraceScale(num_requests=4, length_divisor=32, max_prompt_len=48, output_len=6)


def test_a_trace_keeps_what_is_shared_and_when_it_came(tmp_path: Path) -> None:
    rows = [
        (0, 1024, [0, 1]),
        (3000, 1200, [0, 1, 2]),
        (3000, 1200, [0, 7, 8]),
        (9000, 5000, [0, 1, 2, 4, 5, 6, 9, 10, 11, 12]),
    ]
    load = trace_load("t", read_trace(_trace(tmp_path, rows)), SCALE)
    first, second, stranger, last = load.prompts
    # 16 tokens per id, and at most 48.
    assert [len(prompt) for prompt in load.prompts] == [32, 37, 37, 48]
    assert second[:32] == first
    assert last[:37] == second
    assert stranger[:16] == first[:16]
    assert not set(stranger[16:]) & set(first[16:])
    # Two rows of one time stamp share the time to the next.
    assert [request.arrival_s for request in load.requests] == [0.0, 3.0, 6.0, 9.0]
    assert {request.max_tokens for request in load.requests} == {6}


def test_a_longer_trace_is_cut_between_conversations(tmp_path: Path) -> None:
    rows = [(1000 * turn, 512 * 3, [0, talk, 50 + talk]) for turn in range(2) for talk in (1, 2, 3)]
    load = trace_load("t", read_trace(_trace(tmp_path, rows)), SCALE)
    assert sorted(Counter(load.prompts).values()) == [2, 2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        ("", "it has rows without hash_ids"),
        ('{"timestamp": 0}', "is no Mooncake trace: Object missing"),
        ("TIMESTAMP,ContextTokens\n", "is no Mooncake trace: JSON is malformed"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "trace"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_trace(path)


def test_optimum_counts_full_blocks_and_always_the_last_token() -> None:
    prompt = tuple(range(1, 9))
    assert least_prefill_tokens([prompt], 4) == 8
    # The second block is there, but its last token has to be computed, and with it the block.
    assert least_prefill_tokens([prompt, prompt], 4) == 8 + 4
    assert least_prefill_tokens([prompt, (*prompt, 9)], 4) == 8 + 1
    # The same tokens behind another beginning are other blocks.
    assert least_prefill_tokens([prompt, (0, *prompt[1:], 9)], 4) == 8 + 9
    # Half a block is not shared.
    assert least_prefill_tokens([prompt[:6], prompt], 4) == 6 + 4


PROMPTS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple), max_size=12)


@settings(max_examples=60)
@given(PROMPTS, st.integers(1, 4))
def test_optimum_is_what_comparing_every_pair_gives(
    prompts: list[tuple[int, ...]], block_size: int
) -> None:
    expected = 0
    for position, prompt in enumerate(prompts):
        usable = [0]
        for earlier in prompts[:position]:
            common = 0
            while common < min(len(earlier), len(prompt)) and earlier[common] == prompt[common]:
                common += 1
            # Only full blocks are kept, and one token is always left to compute.
            blocks = min(common, len(prompt) - 1) // block_size
            usable.append(blocks * block_size)
        expected += len(prompt) - max(usable)
    assert least_prefill_tokens(prompts, block_size) == expected


LOAD = RoutingLoad(
    "two",
    (RoutingRequest(0.0, tuple(range(100)), 8), RoutingRequest(0.5, tuple(range(100)), 8)),
)


def _row(answers: list[Answer]) -> RoutingRow:
    counts = [EngineCounts(114, 3, 0), EngineCounts(6, 2, 1)]
    return routing_row(LOAD, "some policy", answers, counts, 16)


def test_a_row_is_what_engines_computed_and_clients_saw() -> None:
    row = _row([Answer(0.1), Answer(0.3)])
    # 120 tokens, of which 7 for each answer were decoded.
    assert row.prefill_tokens == 106
    assert row.optimum_tokens == 100 + 4
    assert row.ratio == pytest.approx(106 / 104)
    assert row.imbalance == pytest.approx(114 / 60)
    assert (row.pulled_blocks, row.failed_pulls) == (5, 1)
    assert row.ttft_ms["p50"] == pytest.approx(200.0)
    assert row.requests_per_s == 2.0
    assert (row.failures, row.first_failure) == (0, None)


def test_failures_are_counted_and_no_first_tokens() -> None:
    row = _row([Answer(0.1), Answer(math.nan, "HTTP 503: later")])
    assert (row.failures, row.first_failure) == (1, "HTTP 503: later")
    assert row.ttft_ms["p99"] == pytest.approx(100.0)


def test_counts_of_another_engine_are_noticed() -> None:
    assert EngineCounts(9, 2, 1).since(EngineCounts(4, 1, 1)) == EngineCounts(5, 1, 0)
    with pytest.raises(ValueError, match="had computed 9 tokens and now has 4"):
        EngineCounts(4, 0, 0).since(EngineCounts(9, 0, 0))


def test_the_drawing_has_a_bar_for_every_figure() -> None:
    rows = [_row([Answer(0.1), Answer(0.3)]), _row([Answer(math.nan, "x"), Answer(math.nan, "x")])]
    root = ElementTree.fromstring(draw_rows(rows))
    background, *bars = root.findall("{http://www.w3.org/2000/svg}rect")
    assert background.attrib["fill"] == "white"
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert len(widths) == 6
    # The second row was answered never: its bars of times are empty, that of tokens is not.
    assert [width > 0 for width in widths] == [True, True, True, False, True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--requests", "0"], "--requests is 0; it must be 1 or more"),
        (["--utilization", "1.5"], "--utilization is 1.5"),
        (["--rate", "0"], "--rate is 0.0"),
        (["--groups", "0"], "no load is left"),
        (["--policy", "best"], "--policy 'best' is not here. There are: round robin, "),
        (["--divisor", "3", "--trace", "TRACE"], "512 must be a multiple of it"),
    ],
)
def test_wrong_arguments_are_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = str(_trace(tmp_path, [(0, 600, [0, 1])]))
    given_arguments = [trace if argument == "TRACE" else argument for argument in arguments]
    assert main(["bench", "routing", *given_arguments]) == 1
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("part", ["prefill_config", "decode_config"])
def test_disaggregation_cannot_do_without_moving_pages(part: str) -> None:
    config: dict[str, object] = {"model_loading_config": {"model_id": "smollm2-135m"}}
    args: dict[str, object] = {"prefill_config": config, "decode_config": config}
    with pytest.raises(ConfigError, match="move_pages is false"):
        parse_pd_serving_args({**args, part: {**config, "move_pages": False}})


def test_every_token_has_a_character_of_its_own() -> None:
    token_ids = (0, 1, 0xD7FF, 0xD800, 0xDFFF, 0xE000, 200_000)
    text = text_of(token_ids)
    assert len(set(text)) == len(token_ids)
    assert text.encode().decode() == text


@pytest.fixture
def prefix_app() -> Iterator[str]:
    """Base URL of two scripted engines behind Ray's own prefix router."""
    port = free_port()
    support = Path(scripted_engine.__file__).parent
    config: dict[str, object] = {
        "model_loading_config": {"model_id": "m", "model_source": "smollm2-135m"},
        "deployment_config": {"num_replicas": 2},
    }
    tree: dict[str, object] = {"applications": [{"args": {"llm_configs": [config]}}]}
    for setting in PREFIX_AFFINITY.settings:
        apply_override(tree, Override.parse(setting))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(support)}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = parse_serving_args({"llm_configs": [config]})
        serve.run(build_application(args, engine_factory=start_paced_engine), name="prefixes")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_rays_prefix_router_sees_our_prompts(prefix_app: str) -> None:
    assert PREFIX_AFFINITY in available_policies()[0]
    rng = random.Random(5)
    prompts = [tuple(rng.randrange(100, 40_000) for _ in range(40)) for _ in range(4)]
    requests = [RoutingRequest(0.02 * i, prompt, 3) for i, prompt in enumerate(prompts * 2)]

    async def ask() -> list[Answer]:
        client = RoutingClient(prefix_app, "m")
        try:
            return await client.run_open(requests, lambda: None)
        finally:
            await client.close()

    answers = asyncio.run(ask())
    assert [answer.failure for answer in answers] == [None] * 8
    assert all(0.0 < answer.first_token_s < 30.0 for answer in answers)
    for prompt in prompts:
        matched, engines = _match(text_of(prompt))
        assert matched == text_of(prompt)
        # Both, if the second request came before the tree knew of the first.
        assert engines


def _match(text: str) -> tuple[str, list[str]]:
    """What the router's own tree says of a prompt: how far it is known, and to which engines."""
    namespace = f"serve::prefixes::{deployment_name('m')}"
    tree = cast("ActorHandle[object]", ray.get_actor("LlmPrefixTreeActor", namespace=namespace))
    reply = ray.get(tree.prefix_match.remote(text))  # pyright: ignore[reportAttributeAccessIssue, reportUnknownVariableType, reportUnknownArgumentType]
    return cast("tuple[str, list[str]]", reply)
