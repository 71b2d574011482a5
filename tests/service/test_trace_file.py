"""The file of a trace: private, whole, bounded, and never a request's problem."""
import os
import stat
from pathlib import Path

import pytest

from ds4mlx.errors import UsageError
from ds4mlx.service.trace_file import TraceFile


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace"


def test_it_is_for_the_owner_alone_and_empty_at_the_start(path):
    path.write_text("before")
    path.chmod(0o644)
    TraceFile(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == b""


def test_a_new_one_is_private_whatever_the_umask(path):
    before = os.umask(0)
    try:
        TraceFile(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_no_link_is_followed(path, tmp_path):
    (tmp_path / "mine").write_text("precious")
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(UsageError, match="symbolic link"):
        TraceFile(path)
    assert (tmp_path / "mine").read_text() == "precious"


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/null", path)])
def test_only_a_regular_file_will_do(path, make):
    make(path)
    with pytest.raises(UsageError, match="--trace"):
        TraceFile(path)


def test_a_missing_directory_is_refused(path):
    with pytest.raises(UsageError, match="No such file"):
        TraceFile(path / "trace")


def test_each_piece_is_in_the_file_at_once(path):
    file = TraceFile(path)
    file.write(file.number(), b"one ")
    assert path.read_bytes() == b"one "


def test_accounts_are_not_mixed_when_they_are_to_be_whole(path):
    file = TraceFile(path, whole=True)
    for number, data, ends in [(1, b"a1 ", False), (2, b"b1 ", False), (3, b"c. ", True), (1, b"a2. ", True),
                               (2, b"b2. ", True), (4, b"d.", True)]:
        file.write(number, data, ends=ends)
    assert path.read_bytes() == b"a1 a2. b1 b2. c. d."


def test_lines_come_in_the_order_they_are_written_otherwise(path):
    file = TraceFile(path)
    for number, data in [(1, b"a"), (2, b"b"), (1, b"c")]:
        file.write(number, data)
    assert path.read_bytes() == b"abc"


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_behind_the_limit_begins_a_new_file_and_one_old_file_stays(path, whole):
    file = TraceFile(path, max_bytes=10, whole=whole)
    for number in (1, 2, 3, 4, 5):
        file.write(number, b"%d....." % number)
        file.write(number, b"......%d" % number, ends=True)
    assert Path(f"{path}.1").read_bytes() == b"4...........4" and path.read_bytes() == b"5...........5"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_the_place_of_the_old_file_is_replaced_and_not_followed(path, tmp_path):
    (tmp_path / "mine").write_text("precious")
    Path(f"{path}.1").symlink_to(tmp_path / "mine")
    file = TraceFile(path, max_bytes=1)
    for number in (1, 2):
        file.write(number, b"data", ends=True)
    assert (tmp_path / "mine").read_text() == "precious" and Path(f"{path}.1").read_bytes() == b"data"


def test_a_full_disk_ends_the_trace_and_fails_nothing(path, caplog):
    file = TraceFile(path, whole=True)
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, file._fd)
    os.close(full)
    for number in (1, 2):
        file.write(number, b"secret", ends=True)
    assert [record.message for record in caplog.records] == ["the trace ends: [Errno 28] No space left on device"]
    file.close()
