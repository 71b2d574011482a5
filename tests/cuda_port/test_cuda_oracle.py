"""The CUDA engine against an independent implementation of the model, run in float32."""
import cupy as cp
import numpy as np
import pytest

from ds4mlx.config import Settings
from ds4mlx.cuda_port.engine import open_cuda
from ds4mlx.engine.protocol import Row, Sampling

PROMPTS = [5, 130, 300, 700]
GREEDY = Sampling(temperature=0.0)
EXACT, FAST = 1e-3, 2e-2    # of logits of deviation 2


def logits_of(engine, session, ids):
    """f32 [T, V]: all of a chunk's, where the engine asks for the last ones only."""
    session.require_pages(len(session.tokens) + len(ids))
    streams, update = engine._model.streams(engine.chunk(session, list(ids)), engine._arena)
    out = cp.empty((len(ids), engine.info.vocab), cp.float32)
    engine._model.logits(streams, update, out)
    session.tokens.extend(ids)
    return cp.asnumpy(out)


def run(engine, ids, sizes):
    """Logits of all positions, fed in chunks of `sizes`; the last size repeats. Size 0: token by token, in steps."""
    session, rows, at, ids = engine.open(4096), [], 0, [int(i) for i in ids]
    for size in [*sizes, *[sizes[-1]] * len(ids)]:
        if at == len(ids):
            break
        if size or not at:
            rows.append(logits_of(engine, session, ids[at:at + max(size, 1)]))
            at += len(rows[-1])
        else:
            engine.decode([Row(session, GREEDY, ids[at])])
            rows.append(session.logits()[None])
            at += 1
    session.close()
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def engine(oracle_path):
    engine = open_cuda(Settings(ctx=4096, kv_round="none", quality=True), oracle_path)
    yield engine
    engine.close()


@pytest.mark.parametrize("n", PROMPTS)
@pytest.mark.parametrize("sizes", [[700], [37], [128], [1, 3, 97, 700], [0], [130, 0]], ids=str)
def test_cuda_logits_in_one_shot_in_chunks_and_in_steps(n, sizes, engine, expected):
    found = run(engine, expected[f"p{n}.input_ids"], sizes)
    np.testing.assert_allclose(found, expected[f"p{n}.logits"], atol=EXACT)


@pytest.fixture(scope="module")
def fast(oracle_path):
    engine = open_cuda(Settings(ctx=4096, kv_round="none"), oracle_path)
    yield engine
    engine.close()


@pytest.mark.parametrize("n", PROMPTS)
@pytest.mark.parametrize("sizes", [[700], [128], [37], [0]], ids=str)
def test_cuda_fast_logits_in_chunks_and_in_steps(n, sizes, fast, expected):
    found = run(fast, expected[f"p{n}.input_ids"], sizes)
    np.testing.assert_allclose(found, expected[f"p{n}.logits"], atol=FAST)


@pytest.mark.parametrize("quality", [True, False])
@pytest.mark.parametrize("steps", [True, False])
def test_cuda_official_rounding_row_by_row(quality, steps, oracle_path, expected):
    """Rounding is discontinuous, and tails are halves here, where the oracle's are not: rows move by a hundredth."""
    engine = open_cuda(Settings(ctx=4096, quality=quality), oracle_path)
    found = {n: run(engine, expected[f"p{n}.input_ids"], [0 if steps else n]) for n in PROMPTS[:3]}
    worst = np.concatenate([np.abs(found[n] - expected[f"p{n}.logits_lowp"]).max(-1) for n in found])
    same = np.concatenate([found[n].argmax(-1) == expected[f"p{n}.logits_lowp"].argmax(-1) for n in found])
    engine.close()
    assert np.median(worst) < 0.05 and same.mean() >= (0.97 if quality else 0.95)
