"""What kernels are compiled for: the sizes of a model and of its rows, as macros."""
from dataclasses import dataclass
from typing import Self

from ds4mlx.cuda_port.build import Defines
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import Config

SLACK = 8  # positions that a window's ring holds beyond the window: a step may have run ahead, and is then forgotten


@dataclass(frozen=True, slots=True)
class Sizes:
    """Channels and heads of attention, bytes of its rows; one object for a model."""
    hidden: int
    heads: int
    head_dim: int
    rotary: int
    q_rank: int
    window: int
    index_heads: int
    index_dim: int
    row_bytes: int
    index_row_bytes: int
    packed: bool            # rows are FP8 and FP4, else float32

    @classmethod
    def of(cls, config: Config, packed: bool) -> Self:
        row, index = schema.attention_row(config, packed), schema.index_row(config, packed)
        return cls(config.hidden_size, config.num_attention_heads, config.head_dim, config.qk_rope_head_dim,
                   config.q_lora_rank, config.sliding_window, config.index_n_heads, config.index_head_dim,
                   row.width * row.dtype.itemsize, index.width * index.dtype.itemsize, packed)

    @property
    def ring(self) -> int:
        """Positions that a window's ring holds."""
        return self.window + SLACK

    @property
    def pairs(self) -> int:
        """Rotary pairs: columns of a table."""
        return self.rotary // 2

    def defines(self, ratio: int) -> Defines:
        """Macros of every kernel that reads or writes rows of a layer of that ratio."""
        return (("D", self.head_dim), ("R", self.rotary), ("ROW", self.row_bytes), ("PACKED", int(self.packed)),
                ("RATIO", ratio), ("PAGE_ROWS", page_rows(ratio)), ("RING", self.ring))


def page_rows(ratio: int) -> int:
    """Rows of a layer of that ratio in a page, which covers SPAN_TOKENS tokens in every layer."""
    return SPAN_TOKENS // ratio if ratio else 1


def overlap(ratio: int) -> int:
    """Groups that a row pools: of ratio 4 also the one before."""
    return 2 if ratio == 4 else 1
