"""What a step and a transfer take: the only numbers of a simulation that are assumed."""

from dataclasses import dataclass

from pageray.cluster.page_layout import PoolLayout

MESSAGE_S = 0.0005
"""One way, between any two processes."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Defaults: orders of magnitude of an 8-billion-parameter model with grouped-query attention
    on one large accelerator, and a 100 Gbit/s network. Nothing was measured for them."""

    step_s: float = 0.008
    """Of every step: reading the weights, launching kernels."""
    prefill_token_s: float = 80e-6
    decode_sequence_s: float = 50e-6
    attention_s: float = 1.3e-9
    """Per (prompt token computed, token before it)."""
    decode_context_token_s: float = 65e-9
    """Per token of a decoding sequence's context: its K and V are read."""
    pull_latency_s: float = 0.005
    """Of a transfer, beside its bytes."""
    push_bytes_per_s: float = 10e9
    """What a holder sends, shared by its pushes."""
    num_layers: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    element_bytes: int = 2

    def layout(self, block_size: int) -> PoolLayout:
        return PoolLayout(
            num_layers=self.num_layers,
            block_size=block_size,
            head_dim=self.head_dim,
            element_bytes=self.element_bytes,
            shards=((0, self.num_kv_heads),),
        )

    def chunk_s(self, start: int, num_tokens: int) -> float:
        """Tokens `start .. start + num_tokens` of one sequence, beside others in a step."""
        if num_tokens == 1:
            return self.decode_sequence_s + start * self.decode_context_token_s
        pairs = num_tokens * (start + num_tokens / 2)
        return num_tokens * self.prefill_token_s + pairs * self.attention_s
