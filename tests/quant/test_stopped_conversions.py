"""A conversion that is stopped, by whatever and wherever, goes on to the same file."""
import resource
from collections import namedtuple
from contextlib import contextmanager

import pytest

from ds4mlx.errors import ModelFileError
from ds4mlx.quant.conversion import convert


class Stopped(Exception):
    pass


def stop_after(count):
    """A progress that gives up at its count-th call."""
    left = iter(range(count))

    def progress(tensor, nbytes):
        if next(left, None) is None:
            raise Stopped
    return progress


def stopped(plan, out, calls):
    with pytest.raises(Stopped):
        convert(plan, out, progress=stop_after(calls))
    return out


@pytest.fixture
def plan(published, plan_of):
    return plan_of(published, "f16")


@pytest.fixture
def whole(published, converted):
    return converted(published, "f16").read_bytes()


@pytest.mark.parametrize("calls", [0, 1, 10, 40, 200])
def test_it_goes_on_to_the_same_bytes(calls, plan, whole, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", calls)
    assert not out.exists()
    convert(plan, out, resume=True)
    assert out.read_bytes() == whole and [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_what_is_written_is_not_written_again(plan, tmp_path):
    """Of a tensor that is done, its bytes are reported at once; so are those of a slab."""
    out, seen = stopped(plan, tmp_path / "m.gguf", 60), []
    with open(f"{out}.partial", "r+b") as file:
        file.seek(plan.layout.offsets[0])
        file.write(b"mark")
    convert(plan, out, resume=True, progress=lambda tensor, nbytes: seen.append(nbytes))
    assert out.read_bytes()[plan.layout.offsets[0]:].startswith(b"mark")
    assert sum(seen) == sum(tensor.nbytes for tensor in plan.tensors)


@pytest.mark.parametrize("damage", [
    lambda done: done.unlink(), lambda done: done.write_text(""), lambda done: done.write_bytes(b"\xff\n")])
def test_without_a_readable_list_it_begins_anew(damage, plan, whole, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", 20)
    damage(tmp_path / "m.gguf.partial.done")
    convert(plan, out, resume=True)
    assert out.read_bytes() == whole


def test_a_line_that_was_being_written_does_not_count(plan, whole, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", 20)
    with open(f"{out}.partial.done", "a") as file:
        file.write(plan.tensors[-1].name)
    convert(plan, out, resume=True)
    assert out.read_bytes() == whole


def test_tensors_that_never_reached_the_file_are_written(plan, whole, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", 30)
    with open(f"{out}.partial", "r+b") as file:
        file.truncate(plan.layout.offsets[3])
    convert(plan, out, resume=True)
    assert out.read_bytes() == whole


def test_another_recipe_does_not_go_on_with_it(plan, published, plan_of, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", 20)
    with pytest.raises(ModelFileError, match="another checkpoint, recipe or imatrix"):
        convert(plan_of(published, "q8"), out, resume=True)


def test_a_stopped_conversion_is_not_lost_by_accident(plan, whole, tmp_path):
    out = stopped(plan, tmp_path / "m.gguf", 20)
    with pytest.raises(ModelFileError, match="--resume"):
        convert(plan, out)
    convert(plan, out, overwrite=True)
    assert out.read_bytes() == whole


def test_a_file_that_is_there_is_not_replaced_unasked(plan, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"mine")
    for options in ({}, {"resume": True}):
        with pytest.raises(ModelFileError, match="--overwrite"):
            convert(plan, tmp_path / "m.gguf", **options)
    assert (tmp_path / "m.gguf").read_bytes() == b"mine"


def test_a_disk_without_room_is_told_beforehand(plan, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(1 << 40, 1 << 40, 1 << 20))
    with pytest.raises(ModelFileError, match="has 0.001 GB free"):
        convert(plan, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


@contextmanager
def files_of_at_most(nbytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_that_takes_no_more_leaves_what_is_written(plan, whole, tmp_path):
    """As a full disk does, a limit of the system makes a write fail halfway."""
    with files_of_at_most(1 << 20), pytest.raises(ModelFileError, match="go on with --resume"):
        convert(plan, tmp_path / "m.gguf")
    convert(plan, tmp_path / "m.gguf", resume=True)
    assert (tmp_path / "m.gguf").read_bytes() == whole


def test_a_directory_that_is_not_there_is_told(plan, tmp_path):
    with pytest.raises(ModelFileError, match="its directory does not exist"):
        convert(plan, tmp_path / "none" / "m.gguf")
