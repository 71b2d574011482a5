"""One state as one file: a checkpoint's head (`sessions.format`) that holds all its rows itself."""
import json
from base64 import b64decode, b64encode
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ds4mlx.api.rendering import Style
from ds4mlx.chat.messages import Json
from ds4mlx.engine.protocol import Engine, ModelInfo, Session
from ds4mlx.errors import CheckpointError
from ds4mlx.models.deepseek_v4.directions import Steering
from ds4mlx.service.service import ENGINE_ABI
from ds4mlx.sessions.container import read_arrays
from ds4mlx.sessions.format import Head, check_layout, check_usable, head_image, read_head
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.integrity import Corrupt, Incomplete
from ds4mlx.sessions.layout import empty_arrays, row_counts
from ds4mlx.sessions.lookup import VisibleKey
from ds4mlx.text.tokenizer import Tokenizer


def identity_of(info: ModelInfo, tokenizer: Tokenizer, steering: Steering | None) -> Identity:
    """What a state of this model is interchangeable with: one that was steered, with those steered alike."""
    base, weights = ((steering.marked(fp) if steering else fp) for fp in (info.base or info.fingerprint,
                                                                          info.fingerprint))
    return Identity(base, weights, tokenizer.fingerprint(), info.layout, ENGINE_ABI, info.quant_bits)


def write(path: Path, session: Session, engine: Engine, identity: Identity, key: bytes) -> None:
    """Under another name first, so that a file of this name is always whole. Raises CheckpointError, OSError."""
    if not session.tokens:
        raise CheckpointError("the session is empty; read or answer something before it is saved")
    arrays = session.snapshot().head(0)
    count = len(arrays["tokens"])
    head = Head(key, "token-text", "agent-session", count, session.context, identity,
                row_counts(engine.arrays(count)))
    unfinished = path.with_name(f".{path.name}.part")
    with unfinished.open("wb") as file:
        for part in head_image(head, arrays).parts:
            file.write(part)
    unfinished.replace(path)


def read(path: Path, identity: Identity, engine: Engine, context: int) -> dict[str, np.ndarray]:
    """The arrays of a state. Raises CheckpointError for one that is damaged or another model's, OSError."""
    try:
        with path.open("rb") as file:
            stored = read_head(file, path.stat().st_size)
            check_usable(stored.head, identity, max(context, stored.head.ctx), min_tokens=1)
            if stored.head.segments:
                raise CheckpointError("its rows lie in other files, as a server's cache has them; give a file that a "
                                      "session saved")
            check_layout(stored, engine.arrays)
            arrays = empty_arrays(engine.arrays(stored.head.tokens))
            read_arrays(file, stored.data_at, stored.container, arrays)
    except (Incomplete, Corrupt) as fault:
        what = str(fault).rpartition(";")[0]    # behind it is what a server does then
        raise CheckpointError(f"{path}: {what}; give a file that a session saved") from fault
    except CheckpointError as fault:
        raise CheckpointError(f"{path}: {fault}") from fault
    return arrays


@dataclass(frozen=True, slots=True)
class Said:
    """What a session is, beside its state: messages and how they were asked, tokens up to the end of each message, and
    what they may be said as. tokens, text: of a session on a server, what it goes on from."""
    messages: list[dict[str, Json]] = field(default_factory=list)
    style: Style = Style()
    ends: list[int] = field(default_factory=list)
    visible: tuple[VisibleKey, ...] = ()
    tokens: list[int] = field(default_factory=list)
    text: str = ""


def write_messages(path: Path, said: Said) -> None:
    """Raises OSError."""
    style = said.style
    keys = [[b64encode(key.key).decode(), key.kind, key.frontier] for key in said.visible]
    told: dict[str, object] = {
        "messages": said.messages, "tools": list(style.tools), "thinking": style.thinking, "effort": style.effort,
        "ends": said.ends, "keys": keys, "tokens": said.tokens, "text": said.text}
    path.write_text(json.dumps(told, ensure_ascii=False), "utf-8")


def read_messages(path: Path) -> Said:
    """What was said, where it is there. Raises CheckpointError."""
    if not path.exists():
        return Said()
    try:
        told = json.loads(path.read_text("utf-8"))
        return Said(told["messages"], Style(tuple(told["tools"]), told["thinking"], told["effort"]), told["ends"],
                    tuple(VisibleKey(b64decode(key), kind, frontier) for key, kind, frontier in told["keys"]),
                    told["tokens"], told["text"])
    except (ValueError, KeyError, TypeError) as fault:
        raise CheckpointError(f"{path}: not the messages of a session ({fault!r}); delete it to load the state "
                              "alone") from fault
