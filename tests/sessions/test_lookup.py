"""How many tokens two histories begin with."""
import random

import pytest

from ds4mlx.sessions.lookup import STRIDE, common_prefix


@pytest.mark.parametrize("length", [0, 1, STRIDE - 1, STRIDE, STRIDE + 1, 2 * STRIDE])
def test_the_common_prefix_ends_at_the_first_difference(length):
    shared = random.Random(0).choices(range(1000), k=length)
    assert common_prefix([*shared, 1, 5], [*shared, 2, 5]) == length
    assert common_prefix(shared, [*shared, 2]) == length
