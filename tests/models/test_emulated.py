"""The whole graph on Metal's kernels, run by the emulator, against the same oracle as the references."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops

LIMIT = 5e-5    # in logits of deviation 2: float32 in another order, as for the references


def run(model, ids, sizes):
    cache, rows, at = model.make_cache(), [], 0
    for size in sizes:
        rows.append(np.array(model(mx.array(ids[None, at:at + size]), cache)[0]))
        mx.eval([layer.state for layer in cache])
        at += size
    return np.concatenate(rows)


@pytest.mark.parametrize("sizes", [[5], [1, 3, 1]], ids=str)
def test_the_oracle_agrees_with_every_kernel(sizes, load_oracle, expected):
    with ops.only("metal-emulated", exact=True):
        found = run(load_oracle(), expected["p5.input_ids"], sizes)
    np.testing.assert_allclose(found, expected["p5.logits"], atol=LIMIT)
