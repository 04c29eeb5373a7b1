import subprocess
import sys

import pytest
import torch

from pageray.kernels.dispatch import Quantization, default_ops, ops_for


def test_names() -> None:
    assert [ops_for(name).name for name in ("reference", "cpu", "gpu")] == [
        "reference",
        "cpu",
        "gpu",
    ]


def test_default_by_device() -> None:
    assert default_ops(torch.device("cpu")) is ops_for("cpu")
    assert default_ops(torch.device("cuda", 0)) is ops_for("gpu")
    assert default_ops(torch.device("cpu"), "int8").name == "cpu-int8"
    refused: tuple[tuple[str, Quantization], ...] = (("meta", "none"), ("cuda", "int8"))
    for device, quantization in refused:
        with pytest.raises(ValueError, match=f"'{device}', '{quantization}'"):
            default_ops(torch.device(device), quantization)


@pytest.mark.parametrize(("name", "absent"), [("reference", "numba"), ("cpu", "triton")])
def test_only_what_is_asked_for_is_imported(name: str, absent: str) -> None:
    code = (
        f"import sys; from pageray.kernels.dispatch import ops_for; ops_for({name!r}); "
        f"sys.exit({absent!r} in sys.modules)"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
