"""A traced step is the step: with numbers as arrays, bounds in place of lengths, and pages beyond what is held."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.engine import mlx_stack
from ds4mlx.models.deepseek_v4.layers import Batch
from ds4mlx.models.deepseek_v4.state import Pools
from ds4mlx.models.deepseek_v4.traced import Form, TracedStep, traceable


@pytest.fixture
def untraced():
    """Graphs run as they are written: on the CPU our operations compute at once, and cannot be traced."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def sequences(model, lengths):
    """A step of several sequences of those lengths, with their layers and pools; the same whenever it is called."""
    pools, rng = Pools(model.config, "official"), np.random.default_rng(3)
    caches = [model.make_cache(4096, pools) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        model.chunk(mx.array(rng.integers(0, 512, length)), cache)
        cache[0].table.hold(length, length + 1)
    pages = np.zeros((len(lengths), 1), np.int32)
    pages[:, 0] = [cache[0].table.entries[0] for cache in caches]
    batch = Batch(model.config, mx.array(rng.integers(0, 512, len(lengths)), mx.int32), np.array(lengths), pages)
    return batch, mlx_stack.stack(caches, model.config.sliding_window)


@pytest.mark.parametrize("lengths", [[3], [127, 40, 299]], ids=str)   # closing no group; closing one of each ratio
def test_it_gives_the_same_logits_and_state(lengths, load_oracle, untraced):
    model = load_oracle("official")
    batch, layers = sequences(model, lengths)
    traced_batch, traced_layers = sequences(model, lengths)
    expected, found = model.step(batch, layers), TracedStep(model)(traced_batch, traced_layers)
    np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)  # sums over more, unseen rows
    for one, other in zip(layers, traced_layers, strict=True):
        for a, b in zip(one.rings(), other.rings(), strict=True):
            np.testing.assert_array_equal(np.array(b), np.array(a))
        for a, b in zip(one.compressors(), other.compressors(), strict=True):
            np.testing.assert_array_equal(np.array(b.pool.rows), np.array(a.pool.rows))


def test_a_graph_is_for_a_bound_that_doubles_and_for_the_rows_that_are_completed(load_oracle):
    config, page = load_oracle().config, np.zeros((1, 1), np.int32)
    forms = {n: Form.of(Batch(config, mx.zeros(1, mx.int32), np.array([n]), page), config)
             for n in (30, 34, 35, 70, 127)}
    assert forms[30] == forms[34] == Form(35, ()) and forms[35] == Form(2048, (4,))
    assert forms[127] == Form(2048, (4, 128)) and forms[70].written == ()


def test_bounds_are_of_whole_pages_once_rows_are_chosen(load_oracle):
    config, pages = load_oracle().config, np.zeros((1, 9), np.int32)
    bounds = {Form.of(Batch(config, mx.zeros(1, mx.int32), np.array([n]), pages), config).bound
              for n in range(100, 16_000, 500)}
    assert bounds == {2048, 4096, 8192, 16_384}


def test_experts_that_the_host_chooses_are_not_traced(load_oracle):
    assert not isinstance(traceable(load_oracle()), TracedStep)
