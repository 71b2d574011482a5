"""A state on its way from the engine to the store's writer, a piece at a time.

Whoever decodes meanwhile waits for one span of rows between two steps, some 7 MB of Flash, and at last for the head.
"""
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ds4mlx.engine.protocol import SPAN_TOKENS, Snapshot
from ds4mlx.sessions.header import KeyKind, Reason
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.toolmap import ToolBlock


@dataclass(slots=True)
class Export:
    """`spans`: those whose rows are not on disk, and are still to be read."""
    snapshot: Snapshot
    key: bytes
    reason: Reason
    spans: Sequence[int]
    aliases: tuple[tuple[bytes, KeyKind], ...] = ()
    blocks: tuple[ToolBlock, ...] = ()
    _rows: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return len(self.snapshot.tokens)

    def step(self) -> SaveJob | None:
        """Read the next piece. Returns the job once all is read. Raises CheckpointError when the session has gone back
        meanwhile."""
        if self.spans:
            span, *self.spans = self.spans
            self._rows[span] = self.snapshot.span(span)
            return None
        return SaveJob(self.key, "token-text", self.reason, self.snapshot.head(self.tokens // SPAN_TOKENS), self._rows,
                       self.aliases, self.blocks)
