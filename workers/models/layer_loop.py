"""Decoder layers one by one: for ranks that add up what each block leaves, and for backends that do
not join layers."""

from collections.abc import Callable, Sequence

from torch import Tensor

from pageray.kernels.ops import LayerProgress, RaggedBatch, RopeStep
from pageray.workers.models.decoder_layer import DecoderLayer


class LayerLoop:
    """`pageray.kernels.ops.LayerStack`, with the sum over the ranks between blocks. The last
    attention's is left to the caller, who may need only some of its rows."""

    def __init__(
        self, layers: Sequence[DecoderLayer], all_reduce: Callable[[Tensor], None]
    ) -> None:
        self._layers = tuple(layers)
        self._all_reduce = all_reduce

    def __call__(
        self,
        residual_TE: Tensor,
        pool_BL2KPD: Tensor,
        rope: RopeStep,
        batch: RaggedBatch,
        progress: LayerProgress,
    ) -> Tensor:
        kv_layers = pool_BL2KPD.unbind(1)
        first, *others = self._layers
        x_TE = first.attention(None, residual_TE, kv_layers[0], rope, batch)
        progress(1)
        before = first
        for index, layer in enumerate(others, start=1):
            self._all_reduce(x_TE)
            x_TE = before.mlp(x_TE, residual_TE)
            self._all_reduce(x_TE)
            x_TE = layer.attention(x_TE, residual_TE, kv_layers[index], rope, batch)
            progress(index + 1)
            before = layer
        return x_TE
