"""Sealed reasoning: what comes back is what went out, or nothing."""
import os
import stat

import pytest

from ds4mlx.server import sealed as module
from ds4mlx.server.sealed import Sealer, seal, unseal


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("DS4MLX_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("text", ["", "plan", "思考 \U0001f914\n" * 1000])
def test_what_was_sealed_is_opened(text):
    assert Sealer(b"k" * 32).open(Sealer(b"k" * 32).seal(text)) == text


def test_a_value_of_another_key_counts_as_absent():
    assert Sealer(b"a" * 32).open(Sealer(b"b" * 32).seal("plan")) is None


@pytest.mark.parametrize("value", ["", ".", "ds4r1.", "ds4r1..", "EqQBCkYIARgCKkA", "ds4r1.é.ü", "ds4r1.A." + "0" * 32])
def test_foreign_values_count_as_absent(value):
    assert Sealer(b"k" * 32).open(value) is None


def test_damage_anywhere_makes_a_value_count_as_absent():
    sealed = Sealer(b"k" * 32).seal("plan")
    for at, character in enumerate(sealed):
        other = "B" if character != "B" else "C"
        assert Sealer(b"k" * 32).open(sealed[:at] + other + sealed[at + 1:]) is None
        assert Sealer(b"k" * 32).open(sealed[:at]) is None


def test_the_key_is_private_and_outlives_the_process(home):
    sealed = seal("plan")
    path = home / module.KEY_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(home) == [path.name]
    module._sealer.cache_clear()
    assert unseal(sealed) == "plan"


def test_without_a_place_for_the_key_the_process_has_one_of_its_own(home, caplog):
    home.write_text("a file where the directory should be")
    assert unseal(seal("plan")) == "plan"
    assert "after a restart" in caplog.text


def test_a_damaged_key_file_is_reported_and_left_alone(home, caplog):
    home.mkdir()
    (home / module.KEY_FILE).write_bytes(b"short")
    assert unseal(seal("plan")) == "plan"
    assert "5 bytes" in caplog.text and (home / module.KEY_FILE).read_bytes() == b"short"
