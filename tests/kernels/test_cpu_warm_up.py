import pytest
import torch
from numba.core import event

from kernel_cases import PagedShape, paged_case
from pageray.kernels.cpu import OPS, LayerShape, warm_up
from pageray.kernels.ops import AttentionOptions, AttentionWeights, RopeStep


def layer_shape(num_heads: int, head_dim: int, block_size: int) -> LayerShape:
    return LayerShape(
        num_heads=num_heads,
        num_kv_heads=num_heads // 3,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32,
        kv_dtype=torch.float32,
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_after_warming_up_nothing_is_left_to_compile(
    rng: torch.Generator, num_threads: int
) -> None:
    """Whatever the numbers of heads, threads and tokens, the window and the cap."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        warm_up(OPS, layer_shape(6, 32, 16))
        assert not warm_up(OPS, layer_shape(9, 64, 8))
        shape = PagedShape(
            sequences=((300, 300), (600, 1), (700, 1)), window=64, softcap=30.0, has_sinks=True
        )
        case = paged_case(shape, generator=rng)
        block = OPS.pack_attention(
            AttentionWeights(
                norm_E=torch.ones(64),
                eps=1e-6,
                qkv_OE=torch.zeros(10 * 32, 64),
                qkv_bias_O=torch.ones(10 * 32),
                qk_norm=None,
                o_EO=torch.zeros(64, 6 * 32),
                o_bias_E=None,
                head_dim=32,
                options=AttentionOptions(scale=1.0, window=64, softcap=30.0),
            )
        )
        num_tokens = case.q_THD.shape[0]
        rope = RopeStep(
            positions_T=torch.zeros(num_tokens, dtype=torch.int64),
            cos_sin_LD=torch.zeros(1, 32),
            slot_mapping_T=torch.full((num_tokens,), -1),
        )
        x_TE = torch.zeros(num_tokens, 64)
        with event.install_recorder("numba:compile") as recorder:
            block(None, x_TE, case.layer, rope, case.batch)
        assert not recorder.buffer
    finally:
        torch.set_num_threads(before)
