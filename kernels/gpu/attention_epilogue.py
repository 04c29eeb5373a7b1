"""What follows the last key: the softmax state of `attend_keys.py` becomes a row of the output.

    out = acc * v_scale / l,   or with a sink, one more key of score s and no value,
    m' = max(m, s),   out = acc * v_scale 2^(m - m') / (l 2^(m - m') + 2^(s - m')).
The sink enters here and not with the keys, so that it counts once however they were split.
"""

# pyright: reportUnknownParameterType=false, reportMissingParameterType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# Reason: values inside a @triton.jit function have no Python types.

import math

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(math.log2(math.e))


@triton.jit
def output_weight(m, total, head, sinks_ptr, v_scale):
    """What acc is multiplied by; `total` is l. m, total and head have one shape, m is in base 2;
    sinks_ptr is float32 [H] or None."""
    if sinks_ptr is None:
        weight = v_scale / total
    else:
        sink = tl.load(sinks_ptr + head) * LOG2_E
        new_m = tl.maximum(m, sink)
        factor = tl.exp2(m - new_m)
        weight = v_scale * factor / (total * factor + tl.exp2(sink - new_m))
    return weight
