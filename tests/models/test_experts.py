import mlx.core as mx
import numpy as np


def test_hashed_layers_follow_the_table_and_weights_sum_to_the_scale(load_oracle):
    model = load_oracle()
    ids = mx.array([0, 7, 300], mx.int32)
    selected, weight = model.layers[0].ffn.route(mx.random.normal((3, 256)), ids)
    assert mx.array_equal(selected, model.layers[0].ffn.gate_tid2eid[ids])
    np.testing.assert_allclose(np.array(weight.sum(-1)), model.config.routed_scaling_factor, rtol=1e-6)
