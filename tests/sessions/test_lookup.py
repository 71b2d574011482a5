"""Which part of a live session a prompt can reuse."""
import random

import pytest

from ds4mlx.sessions.lookup import STRIDE, Reuse, common_prefix, reusable


@pytest.mark.parametrize("length", [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 2 * STRIDE])
def test_the_common_prefix_ends_at_the_first_difference(length):
    shared = random.Random(0).choices(range(1000), k=length)
    assert common_prefix([*shared, 1, 5], [*shared, 2, 5]) == length
    assert common_prefix(shared, [*shared, 2]) == length


def test_a_prompt_that_continues_the_session_reuses_all_of_it():
    assert reusable([1, 2], [1, 2, 3]) == Reuse("memory-token", 2)


def test_a_prompt_that_leaves_the_session_early_needs_a_rewind():
    assert reusable([1, 2, 9], [1, 2, 3]) == Reuse("memory-rewind", 2)


def test_nothing_in_common_is_no_reuse():
    assert reusable([], [1]) == reusable([9], [1]) == Reuse("none", 0)
