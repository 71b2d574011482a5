"""A conversation that one engine saved goes on in the other."""
import mlx.core as mx
import numpy as np
import pytest
from state import whole

from ds4mlx import ops
from ds4mlx.config import Settings
from ds4mlx.cuda_port.engine import open_cuda
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.ops.route import probability

# Of logits of deviation 7, through six layers and twelve steps: two orders of adding up in float32 make 1e-3. A step
# may be farther off only where a choice was closer than what it goes by differs, 2e-4 of its deviation: of two rows
# that lay 9e-5 apart the engines took one each, 0.011 in logits. Where rows are rounded to a few bits, one of them may
# fall to the other side, and then an expert that led by 0.002 may not be chosen: the logits of such a token were seen
# to differ by 0.73, those of the tokens around it by a thousandth. So there most steps are held to their tolerance.
NEAR, MOSTLY_NEAR, STEPS = 2e-3, 2e-2, 12
CLOSE, TIPPED = 2e-4, 5e-2
TEXT = np.random.default_rng(5).integers(5, 4000, 2608).tolist()


@pytest.fixture(scope="module", params=["none", "official"])
def engines(request, tiny_path):
    mx.set_default_device(mx.cpu)
    settings = Settings(ctx=4096, kv_round=request.param, quality=True)
    engines = {"cuda": open_cuda(settings, tiny_path), "mlx": open_mlx(settings, tiny_path)}
    yield engines, request.param == "official"
    for engine in engines.values():
        engine.close()


@pytest.fixture
def margins(monkeypatch):
    """Of the choices among rows and among experts that the MLX engine has made of a single token since this was
    cleared: how far the last one chosen lies before the next, in deviations of what they are chosen by."""
    found, route, select_rows = [], ops.route, ops.select_rows

    def keep(scores, k):
        if k < scores.size:
            best = np.sort(scores)[::-1]
            found.append((best[k - 1] - best[k]) / scores.std())

    def watched_route(logits, bias, table, ids, k, scale):
        if bias is not None and len(logits) == 1:
            keep(np.array(probability(logits) + bias)[0], k)
        return route(logits, bias, table, ids, k, scale)

    def watched_rows(scores, positions, ratio, k):
        if len(scores) == 1:
            keep(np.array(scores)[0, :(positions.item() + 1) // ratio], k)
        return select_rows(scores, positions, ratio, k)

    monkeypatch.setattr(ops, "route", watched_route)
    monkeypatch.setattr(ops, "select_rows", watched_rows)
    return found


def generate(engine, session, margins, fed=()):
    """Token ids, greedy or those that are `fed`, with the logits after each of STEPS and its least margin."""
    tokens, logits, closest = [], [], []
    for i in range(STEPS):
        last = (fed[i - 1] if fed else tokens[-1]) if i else None
        margins.clear()
        (step,), = engine.decode([Row(session, Sampling(temperature=0.0), last)])
        tokens.append(step.token)
        logits.append(session.logits())
        closest.append(min(margins, default=np.inf))
    return tokens, np.stack(logits), np.array(closest)


@pytest.mark.parametrize("writer, reader", [("cuda", "mlx"), ("mlx", "cuda")])
@pytest.mark.parametrize("length", [5, 2600, 2607])
def test_cuda_and_mlx_go_on_where_the_other_stopped(writer, reader, length, engines, margins):
    engines, rounded = engines
    first, second = (engines[name].open(4096) for name in (writer, reader))
    engines[writer].prefill(first, TEXT[:length])
    second.restore(whole(first))
    tokens, logits, closest = generate(engines[writer], first, margins)
    others, found, of_reader = generate(engines[reader], second, margins, tokens)
    far, closest = np.abs(found - logits).max(-1), np.minimum(closest, of_reader)   # one of them is MLX's
    if rounded:
        assert np.median(far) < MOSTLY_NEAR and np.mean(np.equal(others, tokens)) > 0.8, far
    else:
        assert others == tokens and (closest[far >= NEAR] < CLOSE).all() and far.max() < TIPPED, (far, closest)
