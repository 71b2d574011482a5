"""Which file a command works on, and the lock on big models."""
import fcntl
import os
from pathlib import Path

import pytest

from ds4mlx.cli.model import engine_lock, resolve_model
from ds4mlx.config import Settings
from ds4mlx.errors import Ds4Error, ModelFileError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.tiny.files import NOISE, TINY, path_of
from ds4mlx.tiny.noise.build import cache_path


@pytest.fixture(autouse=True)
def cached_tiny(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_path.cache_clear()
    yield
    cache_path.cache_clear()


def test_without_a_name_the_tiny_model_stands_in_and_says_so(capsys):
    assert resolve_model(Settings()) == path_of(TINY)
    notice = capsys.readouterr()
    assert notice.out == "" and "tiny model" in notice.err and "download.sh" in notice.err


def test_asked_for_by_name_it_needs_no_notice(capsys):
    assert resolve_model(Settings(model=Path("tiny"))) == path_of(TINY) and capsys.readouterr().err == ""


def test_noise_is_the_other_built_in_model():
    assert resolve_model(Settings(model=Path("noise"))) == path_of(NOISE) == cache_path()


def test_the_linked_file_comes_before_the_tiny_model(tmp_path, capsys):
    (tmp_path / "ds4flash.gguf").write_bytes(b"GGUF")
    assert resolve_model(Settings()) == Path("ds4flash.gguf") and capsys.readouterr().err == ""


@pytest.mark.parametrize("name, message", [
    ("n" * 300, "File name too long"), ("loop", "symbolic link"), ("nul\0", "null")])
def test_a_path_that_cannot_be_looked_up_says_why(tmp_path, name, message):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ModelFileError, match=message):
        GGUF.open(resolve_model(Settings(model=Path(name))))


def test_a_dangling_link_is_named_as_one(tmp_path):
    (tmp_path / "ds4flash.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelFileError, match="a link to a file that is gone"):
        resolve_model(Settings(model=Path("ds4flash.gguf")))


def test_one_big_model_at_a_time(tmp_path):
    with engine_lock(Settings(), Path("big.gguf")):
        assert (tmp_path / "home").stat().st_mode & 0o777 == 0o700
        with pytest.raises(Ds4Error, match=f"process {os.getpid()} has a model loaded"):
            with engine_lock(Settings(), Path("other.gguf")):
                pass
        with engine_lock(Settings(lock=False), Path("other.gguf")), engine_lock(Settings(), cache_path()):
            pass
    with engine_lock(Settings(), Path("big.gguf")):
        pass


def test_the_lock_ends_with_its_holder_whatever_the_file_says(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "engine.lock").write_text("99999999\n")
    with engine_lock(Settings(), Path("big.gguf")), open(tmp_path / "home" / "engine.lock") as file:
        assert file.read() == f"{os.getpid()}\n"
        with pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_state_directory_that_cannot_be_made_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DS4MLX_HOME", str(tmp_path / "file"))
    with pytest.raises(Ds4Error, match="DS4MLX_HOME"):
        with engine_lock(Settings(), Path("big.gguf")):
            pass
