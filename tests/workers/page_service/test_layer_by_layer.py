"""Pages of a prompt leave the prefill engine while its last layers are still being computed."""

import threading
from concurrent.futures import ThreadPoolExecutor

from engine_process import SECRET, greedy
from fake_engine import BLOCK_SIZE, NUM_LAYERS, fake_engine
from pageray.cluster.ids import EngineId, Epoch
from pageray.workers.async_engine import AsyncEngine
from pageray.workers.page_service.page_agent import PageAgent

NUM_BLOCKS = 6
PROMPT = [(3 * position) % 90 for position in range(NUM_BLOCKS * BLOCK_SIZE + 1)]
BOUND_S = 10.0


class Gate:
    """Holds the engine's thread before each layer until it is opened."""

    def __init__(self) -> None:
        self.passes = threading.Semaphore(0)

    def __call__(self) -> None:
        assert self.passes.acquire(timeout=BOUND_S), "the test never opened the gate"


def test_a_group_of_layers_arrives_before_the_next_is_computed() -> None:
    gate = Gate()
    holder = fake_engine(64, budget=256, before_layer=gate)
    runner = AsyncEngine(holder)
    source = PageAgent(
        holder, engine_id=EngineId("p"), epoch=Epoch(1), secret=SECRET, prefills=runner
    )
    decoder = fake_engine(64, budget=256)
    puller = PageAgent(decoder, engine_id=EngineId("d"), epoch=Epoch(1), secret=SECRET)
    arrived = threading.Semaphore(0)
    confirm = puller.arrivals.confirm

    def counting_confirm(*arguments: object) -> bool:
        is_good = confirm(*arguments)  # type: ignore[arg-type]
        arrived.release()
        return is_good

    puller.arrivals.confirm = counting_confirm  # type: ignore[method-assign]
    request = greedy(PROMPT, 4)
    try:
        with ThreadPoolExecutor(1) as executor:
            pull = executor.submit(
                puller.pull,
                decoder.pages.contents_of(request),
                source.info,
                timeout_s=BOUND_S,
                compute=request,
            )
            # The whole prompt is one step; a layer at a time is let through.
            for _ in range(NUM_LAYERS):
                assert not pull.done()
                gate.passes.release()
                assert arrived.acquire(timeout=BOUND_S), "its pages waited for the next layer"
            outcome = pull.result(timeout=BOUND_S)
        assert (outcome.num_blocks, outcome.num_computed_blocks) == (NUM_BLOCKS, NUM_BLOCKS)
        assert outcome.failure is None
        decoder.add(request)
        while decoder.has_requests:
            decoder.step()
        assert decoder.stats().num_computed_tokens == 1 + 3
    finally:
        gate.passes.release(1000)
        for agent in (source, puller):
            agent.close()
        runner.shutdown()
        decoder.shutdown()
