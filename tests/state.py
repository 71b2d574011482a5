"""A session's whole state, put together from the pieces that its snapshot gives."""
import numpy as np

from ds4mlx.engine.protocol import SPAN_TOKENS


def whole(session, spans=None, snapshot=None):
    """Arrays for `restore`, read in the given number of spans and a head; None: all full spans. Without a snapshot, of
    the session as it is."""
    snapshot = snapshot or session.snapshot()
    spans = len(snapshot.tokens) // SPAN_TOKENS if spans is None else spans
    pieces = [*(snapshot.span(i) for i in range(spans)), snapshot.head(spans)]
    return {name: np.concatenate([piece[name] for piece in pieces if name in piece]) for name in pieces[-1]}
