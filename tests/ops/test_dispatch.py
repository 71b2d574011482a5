import mlx.core as mx
import pytest

from ds4mlx import ops
from ds4mlx.ops.dispatch import pick


def test_the_asked_for_implementation_runs_and_the_reference_where_it_is_missing():
    with ops.only("metal"):
        assert pick(min, metal=max) is max and pick(min, native=max) is min
    with ops.only("reference"):
        assert pick(min, metal=max, native=max) is min


def test_the_choice_ends_with_the_block_even_after_an_error():
    before = pick("r", metal="m", cuda="c", native="n")
    with pytest.raises(RuntimeError), ops.only("metal"):
        raise RuntimeError
    assert pick("r", metal="m", cuda="c", native="n") == before


def test_the_device_is_the_one_mlx_works_on():
    assert (ops.device() == "cpu") == (mx.default_device() == mx.Device(mx.cpu))
