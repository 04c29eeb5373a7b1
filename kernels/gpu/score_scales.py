"""The two numbers that turn a product q . k into a score in base 2, s * log2(e).

Without a soft cap: (q . k) * scale * k_scale * log2(e). With one, c * tanh(x) for
x = (q . k) * scale * k_scale / c is c - 2 c / (1 + e^(2 x)), which overflows for no x: e^(2 x) is
infinite from x = 45 on, and the score then c. So the product is scaled to 2 x log2(e).
"""

import math

from pageray.kernels.ops import AttentionOptions


def score_scales(options: AttentionOptions) -> dict[str, float]:
    """The arguments `score_scale` and `softcap_log2` of `attend_keys.py`."""
    to_base_2 = math.log2(math.e)
    scale = options.scale * options.k_scale * to_base_2
    if options.softcap > 0:
        scale *= 2 / options.softcap
    return {"score_scale": scale, "softcap_log2": options.softcap * to_base_2}
