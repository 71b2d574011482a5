"""Cache files of a toy model, small enough to damage at every byte, and readers that open them as a store does.

The toy has three layers: a window alone, rows of 128 tokens, rows of 4 tokens with an indexer.
"""
import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ds4mlx.sessions.container import DTYPES, read_arrays
from ds4mlx.sessions.format import Alias, Head, alias_image, head_image, read_alias, read_head, read_tokens
from ds4mlx.sessions.identity import Identity, chain_hashes, head_name
from ds4mlx.sessions.layout import empty_arrays, head_views, row_counts, segment_views
from ds4mlx.sessions.segment import Segment, read_segment, segment_image
from ds4mlx.sessions.toolmap import ToolBlock

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "kvm-v1-tiny.json").read_text("utf-8"))
IDENTITY = Identity("a" * 64, "b" * 64, "c" * 64, "d" * 64, engine_abi=1, quant_bits=2)
U8, U32, F32 = np.dtype("u1"), np.dtype("<u4"), np.dtype("<f4")
BLOCKS = (ToolBlock(("call_1", "call_2"), "", "\n\n<calls>…</calls>", (7, 8, 9)),
          ToolBlock(("toolu_3",), "\n", "\n<calls/>", ()))


def layout(tokens):
    """Arrays of a state of the toy, as an engine lists them."""
    window = min(tokens, 4)
    return {
        "tokens": ((tokens,), U32), "logits": ((5,), F32),
        "L0.raw": ((window, 3), U8),
        "L1.raw": ((window, 3), U8), "L1.comp": ((tokens // 128, 3), U8), "L1.cstate_kv": ((tokens % 128, 1), F32),
        "L2.raw": ((window, 3), U8), "L2.comp": ((tokens // 4, 3), U8), "L2.cstate_kv": ((8, 1), F32),
        "L2.index": ((tokens // 4, 1), U8)}


def state(tokens, seed=0):
    """A whole state of the toy."""
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 200, shape).astype(dtype) for name, (shape, dtype) in layout(tokens).items()}


def head_of(whole, spans=0, **changes):
    tokens = len(whole["tokens"])
    head = Head(b"<user>hello", "token-text", "cold", tokens, 1 << 20, IDENTITY, row_counts(layout(tokens)),
                chain_hashes(IDENTITY, whole["tokens"])[:spans], created=1_790_000_000, writer="ds4mlx 0")
    return replace(head, **changes)


def head_bytes(whole, spans=0, **changes):
    return bytes_of(head_image(head_of(whole, spans, **changes), head_views(whole, layout, spans)))


def segment_bytes(whole, span=0):
    name = chain_hashes(IDENTITY, whole["tokens"])[span]
    return bytes_of(segment_image(Segment(name, span, IDENTITY, created=1_790_000_000),
                                  segment_views(whole, layout, span)))


def alias_bytes(key=b"<user>hello again"):
    return bytes_of(alias_image(Alias(key, "thinking-visible", head_name(b"<user>hello", IDENTITY), "evict", 9,
                                      4096, IDENTITY.quant_bits, created=1_790_000_000)))


def golden_bytes():
    return base64.b64decode(GOLDEN["base64"])


def bytes_of(image):
    out = io.BytesIO()
    image.write(out)
    return out.getvalue()


def arrays_in(data, stored):
    """Every array of a file, in memory made by the file's own shapes."""
    arrays = empty_arrays({spec.name: (spec.shape, DTYPES[spec.dtype]) for spec in stored.container.arrays})
    read_arrays(io.BytesIO(data), stored.data_at, stored.container, arrays)
    return arrays


def open_head(data):
    """Everything in a head file: (head, arrays as bytes, why its tool map was ignored)."""
    src = io.BytesIO(data)
    stored = read_head(src, len(data))
    read_tokens(src, stored)
    arrays = {name: array.tobytes() for name, array in arrays_in(data, stored).items()}
    return replace(stored.head, hits=0, last_used=0), arrays, stored.tool_map_fault


def open_segment(data):
    stored = read_segment(io.BytesIO(data), len(data))
    return stored.segment, {name: array.tobytes() for name, array in arrays_in(data, stored).items()}


def open_alias(data):
    return replace(read_alias(io.BytesIO(data), len(data)), hits=0, last_used=0)
