"""What was typed in a chat is remembered: in which file, how much of it, and what damage does."""
import os
import stat

import pytest

from ds4mlx.cli.chat_input import MOST_ENTRIES, read_history, write_entry


@pytest.fixture
def path(tmp_path):
    return tmp_path / "home" / "history"


def test_entries_come_back_in_their_order_and_with_their_lines(path):
    read_history(path)
    for entry in ("one", "two\nlines", "中文 \u2028"):
        write_entry(path, entry)
    assert read_history(path) == ["one", "two\nlines", "中文 \u2028"]


def test_file_and_folder_are_private(path):
    read_history(path)
    write_entry(path, "one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_oldest_entries_go_when_there_are_too_many(path):
    read_history(path)
    for i in range(MOST_ENTRIES + 10):
        write_entry(path, str(i))
    assert read_history(path) == [str(i) for i in range(10, MOST_ENTRIES + 10)] == read_history(path)
    assert os.listdir(path.parent) == ["history"]


def test_a_damaged_line_costs_itself_alone(path):
    read_history(path)
    write_entry(path, "one")
    with path.open("ab") as file:
        file.write(b'"half of\n\xff\n5\n')
    write_entry(path, "two")
    assert read_history(path) == ["one", "two"]


def test_a_line_that_cannot_be_kept_is_told_of(tmp_path, capsys):
    write_entry(tmp_path / "none" / "history", "one")
    assert "this line is not remembered" in capsys.readouterr().err
