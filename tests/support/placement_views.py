"""Engines as routers see them, made up."""

from pageray.cluster.block_keys import root_key
from pageray.cluster.coordinator.messages import Endpoint, EngineInfo, EngineLoad, EngineView
from pageray.cluster.ids import EngineId, Epoch
from pageray.cluster.page_layout import PoolLayout
from pageray.router.wire import ModelFacts

BLOCK_SIZE = 16
ROOT = root_key("m", "f", BLOCK_SIZE)
FACTS = ModelFacts(
    vocab_size=1000,
    max_model_len=4096,
    capacity_tokens=4096,
    eos_token_ids=(2,),
    block_size=BLOCK_SIZE,
    root_key=ROOT,
)


def view_of(
    name: str, *, num_queued_tokens: int = 0, num_running: int = 0, num_waiting: int = 0
) -> EngineView:
    layout = PoolLayout(
        num_layers=2, block_size=BLOCK_SIZE, head_dim=4, element_bytes=2, shards=((0, 1),)
    )
    info = EngineInfo(
        engine_id=EngineId(name),
        epoch=Epoch(1),
        root_key=ROOT,
        block_size=BLOCK_SIZE,
        num_blocks=100,
        layout=layout,
        endpoint=Endpoint(control_address="x:1", data_address="x:2", host_id="h", pid=1),
    )
    return EngineView(
        info=info,
        load=EngineLoad(
            num_queued_tokens=num_queued_tokens,
            num_running=num_running,
            num_waiting=num_waiting,
            prefill_tokens_per_s=1000.0,
        ),
    )
