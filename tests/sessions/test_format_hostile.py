"""Files written to do harm: a reader refuses or reads them, and allocates by what is there, not by what they say."""
import io
import tracemalloc

import pytest
from fuzz_format import OPENERS, SEEDS, files, seal, survives
from hypothesis import given, settings
from toy_files import golden_bytes, open_head

from ds4mlx.errors import CheckpointError
from ds4mlx.sessions.format import read_head
from ds4mlx.sessions.integrity import Incomplete


@settings(max_examples=300)
@given(files)
def test_no_file_does_more_than_be_refused(data):
    survives(data)


@pytest.mark.parametrize("data", SEEDS)
def test_the_fuzzer_seals_files_as_the_writer_does(data):
    assert seal(data) == data
    assert sum(not refused(opener, data) for opener in OPENERS) == 1


def refused(opener, data):
    try:
        opener(data)
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("at", [8, 40, 48, 95])  # tokens, payload bytes, key bytes, JSON bytes
def test_a_length_of_gigabytes_allocates_nothing(at):
    data = seal(golden_bytes()[:at] + b"\xff\xff\xff\x7f" + golden_bytes()[at + 4:])
    tracemalloc.start()
    assert refused(open_head, data)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_that_shrinks_while_it_is_read_is_incomplete():
    with pytest.raises(Incomplete):
        read_head(io.BytesIO(golden_bytes()[:900]), len(golden_bytes()))
