"""Reasoning as an opaque value that a client carries back, where it would not carry the text.

`ds4r1.` + base64url(zlib(UTF-8 text)) + `.` + 32 hex digits of HMAC-SHA256 over all before. Not encryption, the text is
the user's own: the code tells values of this installation, whole, from any others, which count as absent.
"""
import hashlib
import hmac
import logging
import os
import secrets
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from functools import cache
from pathlib import Path

from ds4mlx.config import state_dir
from ds4mlx.errors import UsageError

log = logging.getLogger(__name__)

PREFIX = "ds4r1."
KEY_FILE, KEY_BYTES = "reasoning.key", 32
CODE_DIGITS = 32


class Sealer:
    """Seals and opens with one key."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def seal(self, text: str) -> str:
        packed = PREFIX + urlsafe_b64encode(zlib.compress(text.encode(), 6)).decode()
        return f"{packed}.{self._code(packed)}"

    def open(self, sealed: str) -> str | None:
        """The text, or None for what this key did not seal, or what was damaged on its way."""
        packed, _, code = sealed.rpartition(".")
        if not packed.startswith(PREFIX) or not hmac.compare_digest(code.encode(), self._code(packed).encode()):
            return None
        return zlib.decompress(urlsafe_b64decode(packed.removeprefix(PREFIX))).decode()

    def _code(self, packed: str) -> str:
        return hmac.new(self._key, packed.encode(), hashlib.sha256).hexdigest()[:CODE_DIGITS]


def seal(text: str) -> str:
    """Reasoning as this installation seals it."""
    return sealer().seal(text)


def unseal(sealed: str) -> str | None:
    """The reasoning in a value that this installation sealed; None for any other. Raises nothing."""
    return sealer().open(sealed)


def sealer() -> Sealer:
    """The installation's, by a key in `state_dir()` that is made when first needed."""
    try:
        return _sealer(state_dir())
    except UsageError as fault:
        return _sealer(Path(os.devnull), str(fault))


@cache
def _sealer(home: Path, fault: str = "") -> Sealer:
    try:
        return Sealer(_read_or_make(home))
    except OSError as broken:
        log.warning("no key for sealed reasoning in %s (%s): what is sealed now will count as foreign after a restart",
                    home, fault or broken.strerror or broken)
        return Sealer(secrets.token_bytes(KEY_BYTES))


def _read_or_make(home: Path) -> bytes:
    """The key. Of several processes that make one at once, the first wins. Raises OSError."""
    path = home / KEY_FILE
    if not path.exists():
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = home / f"{KEY_FILE}.{secrets.token_hex(8)}"
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    key = path.read_bytes()
    if len(key) != KEY_BYTES:
        raise OSError(f"{KEY_FILE} has {len(key)} bytes, need {KEY_BYTES}; delete it")
    return key
