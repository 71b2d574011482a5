from dataclasses import replace

import mlx.core as mx
import pytest

from ds4mlx import ops
from ds4mlx.models.deepseek_v4.layers import Chunk
from ds4mlx.models.deepseek_v4.names import validate


@pytest.mark.skipif(ops.device() != "cpu", reason="counts what the CPU's products allocate")
def test_a_long_chunk_holds_the_keys_of_one_block_of_queries_at_a_time(load_oracle, oracle_file):
    config = replace(validate(oracle_file), index_topk=512)
    model, tokens = load_oracle(config=config), 3072
    x, chunk = mx.random.normal((tokens, config.hidden_size)), Chunk(config, mx.zeros(tokens, mx.int32), 0)
    mx.eval(x)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    mx.eval(model.layers[2].attn(x, chunk, model.make_cache()[2]))
    block = 128 * config.index_topk * config.head_dim * 4  # of the 8 blocks that choose their rows
    assert mx.get_peak_memory() - before < 5 * block  # 4.1 with x, q and o; 6.4 when nothing makes one wait for another
