import mlx.core as mx
import numpy as np

from ds4mlx.models.deepseek_v4.experts import router_probability


def test_router_probability_is_the_independent_one(units):
    found = np.array(router_probability(mx.array(units["router.logits"])))
    np.testing.assert_allclose(found, units["router.prob"], rtol=1e-6)  # theirs is float64 inside


def test_router_probability_neither_overflows_nor_vanishes():
    found = np.array(router_probability(mx.array([-80.0, 0.0, 80.0, 3e4])))
    np.testing.assert_allclose(found, [np.exp(-40.0), np.log(2) ** 0.5, 80 ** 0.5, 3e4 ** 0.5], rtol=1e-5)


def test_hashed_layers_follow_the_table_and_weights_sum_to_the_scale(load_oracle):
    model = load_oracle()
    ids = mx.array([0, 7, 300], mx.int32)
    selected, weight = model.layers[0].ffn.route(mx.random.normal((3, 256)), ids)
    assert mx.array_equal(selected, model.layers[0].ffn.gate_tid2eid[ids])
    np.testing.assert_allclose(np.array(weight.sum(-1)), model.config.routed_scaling_factor, rtol=1e-6)
