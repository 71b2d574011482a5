"""Which model file a command works on, its vocabulary, and the lock that keeps a second big model out of memory."""
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ds4mlx.config import Settings, state_dir
from ds4mlx.errors import Ds4Error, ModelFileError
from ds4mlx.tiny.files import BUILT_IN, TINY, is_built_in, path_of

if TYPE_CHECKING:
    from ds4mlx.text.tokenizer import Tokenizer

DEFAULT_FILE = Path("ds4flash.gguf")
GET_ONE = "./download.sh q2 fetches one and links it as ./ds4flash.gguf; --model tiny is built in and needs none"


def resolve_model(settings: Settings) -> Path:
    """The GGUF file that the settings mean.

    Says so on standard error when nothing was named and the tiny model stands in. Raises ModelFileError.
    """
    if settings.model is None and not DEFAULT_FILE.exists():
        print(f"ds4mlx: no --model, no DS4MLX_MODEL and no ./{DEFAULT_FILE}: using the built-in tiny model, which "
              f"knows little.\n  For DeepSeek V4 Flash: ./download.sh q2, or --model FILE.gguf", file=sys.stderr)
    named = settings.model or (DEFAULT_FILE if DEFAULT_FILE.exists() else TINY)
    if named in BUILT_IN:
        return path_of(named)
    try:
        named.stat()
    except FileNotFoundError:
        found = "a link to a file that is gone" if named.is_symlink() else "no such file"
        raise ModelFileError(f"{named}: {found} (looked for {named.absolute()}); {GET_ONE}") from None
    except (OSError, ValueError):
        pass  # opening it says why it cannot be read
    return named


def open_tokenizer(args: Namespace) -> "Tokenizer":
    """The vocabulary of the model that a command line means. Reads no weights. Raises ModelFileError, UsageError."""
    from ds4mlx.cli.options import settings_from
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.text.tokenizer import Tokenizer
    with GGUF.open(resolve_model(settings_from(args))) as file:
        return Tokenizer.from_gguf(file.metadata)


@contextmanager
def engine_lock(settings: Settings, path: Path) -> Iterator[None]:
    """Inside, no other process may load a big model: two of them swap. A built-in one needs no lock.

    The system lets go of the lock when the process ends, however it ends. Raises Ds4Error when it is taken.
    """
    if not settings.lock or is_built_in(path):
        yield
        return
    import fcntl
    home = state_dir()
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(home / "engine.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as fault:
        raise Ds4Error(f"{home / 'engine.lock'}: {fault.strerror}; set DS4MLX_HOME to a directory of yours, or give "
                       "--no-lock") from fault
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip() or "unknown"
            raise Ds4Error(f"process {owner} has a model loaded ({home / 'engine.lock'}); stop it, or give --no-lock "
                           "if both fit in memory") from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        yield
    finally:
        os.close(descriptor)
