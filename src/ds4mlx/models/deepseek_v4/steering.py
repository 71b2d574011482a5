"""Steering: what a half layer gives, less its part along a direction, before it is mixed back into the streams."""
from typing import NamedTuple, Self

import mlx.core as mx
import numpy as np


class Direction(NamedTuple):
    """v [D], and v times the strength s, both f32."""
    v: mx.array
    scaled: mx.array

    @classmethod
    def of(cls, v: np.ndarray, strength: float) -> Self | None:
        """None, which changes nothing, where the direction or the strength is zero."""
        if not strength or not v.any():
            return None
        return cls(mx.array(v, mx.float32), mx.array(v * np.float32(strength), mx.float32))


def steered(y: mx.array, direction: Direction | None) -> mx.array:
    """y - s v (v . y) for each row of y [T, D]."""
    return y if direction is None else y - (y @ direction.v)[:, None] * direction.scaled
