"""A matrix, or a stack of them, as its file holds it, on the card."""
from dataclasses import dataclass

from ds4mlx.cuda_port.device import cupy as cp


@dataclass(frozen=True, slots=True)
class Weight:
    """`raw` u8 [..., row bytes] in GGUF blocks of `kind`; `shape` counts weights, slowest axis first."""
    kind: str
    raw: "cp.ndarray"
    shape: tuple[int, ...]
    arranged: bool = False  # rows as ops.arranged() leaves them, not as in the file
    tiled: bool = False     # or in tiles, for expert_step.cu
