"""A conversation that one engine saved goes on in the other."""
import mlx.core as mx
import numpy as np
import pytest
from state import whole

from ds4mlx.config import Settings
from ds4mlx.cuda_port.engine import open_cuda
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.protocol import Row, Sampling

# Of logits of deviation 1.5, through six layers and twelve steps: two orders of adding up in float32; where rows are
# rounded to a few bits, one of them may fall to the other side.
NEAR = {"none": 2e-3, "official": 0.3}
TEXT = np.random.default_rng(5).integers(5, 4000, 2608).tolist()


@pytest.fixture(scope="module", params=["none", "official"])
def engines(request, tiny_path):
    mx.set_default_device(mx.cpu)
    settings = Settings(ctx=4096, kv_round=request.param, quality=True)
    engines = {"cuda": open_cuda(settings, tiny_path), "mlx": open_mlx(settings, tiny_path)}
    yield engines, NEAR[request.param]
    for engine in engines.values():
        engine.close()


def generate(engine, session, count):
    """Token ids, greedy, with the logits after each."""
    tokens, logits = [], []
    for _ in range(count):
        (step,), = engine.decode([Row(session, Sampling(temperature=0.0), tokens[-1] if tokens else None)])
        tokens.append(step.token)
        logits.append(session.logits())
    return tokens, np.stack(logits)


@pytest.mark.parametrize("writer, reader", [("cuda", "mlx"), ("mlx", "cuda")])
@pytest.mark.parametrize("length", [5, 2600, 2607])
def test_cuda_and_mlx_go_on_where_the_other_stopped(writer, reader, length, engines):
    engines, near = engines
    first, second = (engines[name].open(4096) for name in (writer, reader))
    engines[writer].prefill(first, TEXT[:length])
    second.restore(whole(first))
    tokens, logits = generate(engines[writer], first, 12)
    others, found = generate(engines[reader], second, 12)
    assert others == tokens
    np.testing.assert_allclose(found, logits, atol=near)
