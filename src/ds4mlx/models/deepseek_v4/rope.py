"""Rotary frequencies and tables, made on the host in float64: at position 10^6 a float32 angle is off by 0.03 rad."""
import math
from functools import cache

import numpy as np

from ds4mlx.models.deepseek_v4.config import Config


@cache
def frequencies(config: Config, compressed: bool) -> np.ndarray:
    """Radians per position of each pair, f64 [rope dims / 2].

    Plain for layers without compression. Compressed layers use their own base with YaRN: slow pairs divided by the
    factor, fast ones kept, a linear ramp between. No magnitude correction: the model was trained without one.
    """
    dims = config.qk_rope_head_dim
    pair = np.arange(dims // 2, dtype=np.float64)
    theta = config.compress_rope_theta if compressed else config.rope_theta
    f = theta ** (-2 * pair / dims)
    if not compressed:
        return f

    def correction(turns: float) -> float:
        """The pair that makes `turns` turns over the original context."""
        return dims * math.log(config.rope_original_context / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(correction(config.rope_beta_fast)), 0)
    high = min(math.ceil(correction(config.rope_beta_slow)), dims - 1)
    ramp = np.clip((pair - low) / max(high - low, 1e-3), 0, 1)
    return f / config.rope_factor * ramp + f * (1 - ramp)


def tables(positions: np.ndarray, f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin, f32 [positions, pairs]."""
    angle = positions.astype(np.float64)[:, None] * f
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
