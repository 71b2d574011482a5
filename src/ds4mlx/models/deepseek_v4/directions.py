"""Directions to steer along, one a layer, and the file that holds them: f32, little-endian, [layers, D], nothing else.

With a direction v and a strength s, an output y of a layer's attention or experts becomes y - s v (v . y): 1 takes away
what lies along v, a negative strength adds to it.
"""
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from ds4mlx.config import Settings
from ds4mlx.errors import ModelFileError, UsageError
from ds4mlx.models.deepseek_v4.config import Config


@dataclass(frozen=True, slots=True, eq=False)
class Steering:
    """vectors f32 [layers, D], used as they are: a direction that was built has length 1. attn, ffn: strengths behind
    the attention and behind the experts."""
    vectors: np.ndarray
    attn: float = 0.0
    ffn: float = 1.0

    @classmethod
    def read(cls, path: Path, layers: int, width: int, attn: float = 0.0, ffn: float = 1.0) -> Self:
        """Raises ModelFileError for a file of another size, or of values that are no numbers."""
        try:
            raw = path.read_bytes()
        except OSError as fault:
            raise ModelFileError(f"{path}: {fault.strerror}; give a file of directions") from fault
        if len(raw) != 4 * layers * width:
            raise ModelFileError(f"{path} has {len(raw)} bytes, need {layers} directions of {width} float32, "
                                 f"{4 * layers * width} bytes; build it with this model")
        vectors = np.frombuffer(raw, "<f4").reshape(layers, width).astype(np.float32)
        if not np.isfinite(vectors).all():
            raise ModelFileError(f"{path} holds values that are not finite; build it anew")
        return cls(vectors, attn, ffn)

    def write(self, path: Path) -> None:
        """The directions, without the strengths."""
        path.write_bytes(np.ascontiguousarray(self.vectors, "<f4").tobytes())

    @property
    def changes(self) -> bool:
        """Whether it changes anything."""
        return bool((self.attn or self.ffn) and self.vectors.any())

    def require_fit(self, config: Config) -> None:
        """Raises UsageError where they are of another model."""
        if self.vectors.shape != (needed := (config.num_hidden_layers, config.hidden_size)):
            raise UsageError(f"directions are of shape {self.vectors.shape}, the model has {needed[0]} layers of width "
                             f"{needed[1]}; build them with this model")

    def __repr__(self) -> str:
        layers, width = self.vectors.shape
        return f"<Steering of {layers} layers of width {width}, attn {self.attn:g}, ffn {self.ffn:g}>"

    def marked(self, fingerprint: str) -> str:
        """The fingerprint of weights that are steered, hex: a state that was steered is not one that was not."""
        if not self.changes:
            return fingerprint
        said = f"{fingerprint} {self.attn!r} {self.ffn!r} ".encode()
        return hashlib.sha256(said + np.ascontiguousarray(self.vectors, "<f4").tobytes()).hexdigest()


def read_steering(settings: Settings, config: Config) -> Steering | None:
    """What the settings say. Raises ModelFileError."""
    if settings.dir_steering_file is None:
        return None
    return Steering.read(settings.dir_steering_file.expanduser(), config.num_hidden_layers, config.hidden_size,
                         settings.dir_steering_attn, settings.dir_steering_ffn)
