"""Weights as their file holds them: blocks of a GGUF type, decoded only when used."""
import mlx.core as mx
import numpy as np

Raw = mx.array | np.ndarray


class Blocks:
    """A stack of quantised matrices or rows, [..., row bytes] u8, still in its GGUF blocks.

    `raw` is a device array, or a view of the mapped file for stacks of which a chunk touches little (experts,
    embedding rows) where the device cannot adopt the mapping: then only what `take` selects is ever copied.
    `arranged`: a row has its codes before its scales, as `arrange` leaves it; CUDA kernels alone read such rows.
    """

    __slots__ = ("raw", "kind", "arranged")

    def __init__(self, raw: Raw, kind: str, arranged: bool = False) -> None:
        self.raw, self.kind, self.arranged = raw, kind, arranged

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the bytes, not the weights."""
        return tuple(self.raw.shape)

    def take(self, index: int | mx.array) -> mx.array:
        """The blocks at `index` of the first axis, on the device. The host reads an index only where it has the
        blocks."""
        if isinstance(self.raw, np.ndarray):
            return mx.array(self.raw[index if isinstance(index, int) else np.array(index)])
        return self.raw[index]

    def rows(self, chosen: slice = slice(None)) -> mx.array:
        """Some of the first axis, on the device; MLX would copy an array of its own to make one of it."""
        raw = self.raw[chosen]
        return mx.array(raw) if isinstance(raw, np.ndarray) else raw

    def host(self) -> np.ndarray:
        """All of it in host memory, without a copy."""
        return self.raw if isinstance(self.raw, np.ndarray) else np.array(self.raw, copy=False)
