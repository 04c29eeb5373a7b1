import torch
from numba.core import event

from kernel_cases import PagedShape, paged_case
from pageray.kernels.cpu import OPS, warm_up


def test_after_warming_up_nothing_is_left_to_compile(rng: torch.Generator) -> None:
    warm_up(6, 2, 32, 16, torch.float32)
    assert not warm_up(9, 3, 64, 8, torch.float32)
    with event.install_recorder("numba:compile") as recorder:
        shape = PagedShape(
            sequences=((300, 300), (600, 1)), window=64, softcap=30.0, has_sinks=True
        )
        case = paged_case(shape, generator=rng)
        OPS.paged_attention(case.q_THD, case.layer, case.batch, case.options)
        x_TE = torch.randn(300, 512, generator=rng)
        OPS.rms_norm(x_TE.view(300, 8, 64)[:, 2:5], torch.ones(64), 1e-6)
        OPS.pack_linear(torch.ones(400, 512), None)(x_TE)
        OPS.pack_mlp(torch.ones(800, 512), None, torch.ones(512, 400), None)(x_TE)
    assert not recorder.buffer
