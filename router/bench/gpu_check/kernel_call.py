"""One call of an operation on given tensors, as data that can be repeated, widened and counted."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pageray.kernels.gpu.model_launches import ModelShape
from pageray.kernels.ops import Ops

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What inputs are made for: `num_tokens` tokens of a model, or rows to sample."""

    shape: ModelShape
    num_tokens: int
    dtype: torch.dtype
    generator: torch.Generator
    """On the device of the inputs. Making a call again gives other numbers."""

    @property
    def device(self) -> torch.device:
        return self.generator.device


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """Inputs, what is done with them, and what that must cost at least."""

    tensors: Tensors
    call: Callable[[Ops, Tensors], tuple[Tensor, ...]]
    """Returns every tensor that was made or changed."""
    num_bytes: int
    """Read and written once each."""
    num_flops: int = 0
    """Of matrix products; 0 where bandwidth alone is the limit."""

    def run(self, ops: Ops) -> tuple[Tensor, ...]:
        """On the tensors themselves, which may change."""
        return self.call(ops, self.tensors)

    def run_on_copies(self, ops: Ops) -> tuple[Tensor, ...]:
        return self.call(ops, {name: tensor.clone() for name, tensor in self.tensors.items()})

    def run_in_float64(self, ops: Ops) -> tuple[Tensor, ...]:
        """On copies whose floating point values are the same numbers in float64."""
        wide = {
            name: tensor.to(
                torch.float64 if tensor.is_floating_point() else tensor.dtype, copy=True
            )
            for name, tensor in self.tensors.items()
        }
        return self.call(ops, wide)


@dataclass(frozen=True)
class KernelCase:
    """An operation by name, and how to make a call of it."""

    name: str
    prepare: Callable[[Setting], KernelCall]


def num_bytes(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
