"""The whole graph on Metal's kernels, run by the emulator, against the same oracle as the references."""
import mlx.core as mx
import numpy as np
import pytest
import state

from ds4mlx import ops
from ds4mlx.config import Settings
from ds4mlx.engine.mlx_decode import Decoder
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.mlx_session import MLXSession
from ds4mlx.engine.protocol import Row, Sampling
from ds4mlx.models.deepseek_v4.state import Pools

LIMIT = 5e-5    # in logits of deviation 2: float32 in another order, as for the references


def run(model, ids, sizes):
    cache, rows, at = model.make_cache(), [], 0
    for size in sizes:
        rows.append(np.array(model(mx.array(ids[None, at:at + size]), cache)[0]))
        mx.eval([layer.state for layer in cache])
        at += size
    return np.concatenate(rows)


def far(found, wanted):
    """The largest difference of a position's logits, for each; and the share of positions that choose the same."""
    return np.abs(found - wanted).max(axis=-1), (found.argmax(-1) == wanted.argmax(-1)).mean()


# Decode and prefill at their border of 8 and 9 tokens, small tiles and large ones, the first row of a group of 128 from
# a single token and from a few, and queries that see more rows than the 8 they choose.
@pytest.mark.parametrize("prompt, sizes", [
    (5, [1, 3, 1]), (130, [9, 118, 1, 2]), (130, [121, 8, 1]),
    pytest.param(300, [37, 93, 170], marks=pytest.mark.sweep),
    pytest.param(130, [1] * 20 + [110], marks=pytest.mark.sweep)], ids=str)
def test_the_oracle_agrees_with_every_kernel(prompt, sizes, load_oracle, expected):
    with ops.only("metal-emulated", exact=True):
        found = run(load_oracle(), expected[f"p{prompt}.input_ids"], sizes)
    np.testing.assert_allclose(found, expected[f"p{prompt}.logits"], atol=LIMIT)


def test_tiles_of_halves_move_logits_by_thousandths(load_oracle, expected):
    """Factors of 11 bits move logits of deviation 2 by 0.005, and by far more where they change the choice of an expert
    or a row, so that only shares can be bounded."""
    with ops.only("metal-emulated"):
        found = run(load_oracle(), expected["p130.input_ids"], [37, 93])
    worst, same = far(found, expected["p130.logits"])
    assert 1e-3 < np.median(worst) < 0.01 and np.quantile(worst, 0.95) < 0.02 and same >= 0.98


def test_packed_rows_are_those_of_the_reference(load_oracle, expected):
    """Float32 in another order takes a few codes the other way, at values that lie between two."""
    model, ids = load_oracle("official"), expected["p130.input_ids"]
    with ops.only("reference"):
        wanted = run(model, ids, [130])
    with ops.only("metal-emulated", exact=True):
        worst, same = far(run(model, ids, [121, 9]), wanted)
    assert np.median(worst) < 0.005 and np.quantile(worst, 0.9) < 0.02 and same >= 0.97


def test_rounding_in_halves_stays_as_near_to_the_oracle(load_oracle, expected):
    with ops.only("metal-emulated"):
        found = run(load_oracle("official"), expected["p130.input_ids"], [130])
    worst, same = far(found, expected["p130.logits_lowp"])
    assert np.median(worst) < 0.1 and same >= 0.95    # 0.05 and 0.977; the reference's own tails cost 0.025


@pytest.fixture
def session(load_oracle):
    with ops.only("metal-emulated", exact=True):
        yield lambda: MLXSession(load_oracle(), 200)


def test_a_saved_and_a_rewound_session_go_on_as_the_oracle_says(session, expected):
    ids, one, other = expected["p130.input_ids"].tolist(), session(), session()
    one.feed(ids[:120])
    one.mark()
    one.feed(ids[10:19])
    assert one.rewind(125) == 120
    other.restore(state.whole(one))
    for each in (one, other):
        each.feed(ids[120:])
        np.testing.assert_allclose(each.logits(), expected["p130.logits"][-1], atol=LIMIT)


def stepped(model, prompts, name):
    """Logits of sessions that took prompts of these lengths by reference, after three steps together on `name`."""
    pools = Pools(model.config, "none")
    sessions, decoder = [MLXSession(model, 200, pools=pools) for _ in prompts], Decoder(model, pools, lookahead=False)
    with ops.only("reference"):
        for session, prompt in zip(sessions, prompts):
            session.feed(prompt)
    with ops.only(name, exact=True):
        for token in (7, 8, 9):
            decoder.decode([Row(session, Sampling(temperature=0.0), token, (token,)) for session in sessions])
        return np.stack([session.logits() for session in sessions])


def test_rows_of_all_lengths_step_together_on_kernels(load_oracle, expected):
    """A window that is not full and one that is, groups of 4 and of 128 that end, rows to choose from and none."""
    ids = expected["p300.input_ids"].tolist()
    prompts = [ids[:2], ids[:126], ids[:157]]
    found, wanted = (stepped(load_oracle(), prompts, name) for name in ("metal-emulated", "reference"))
    np.testing.assert_allclose(found, wanted, atol=LIMIT)


def test_the_tiny_model_says_the_same_through_the_engine(tiny_path):
    """Greedy, after a chunk in halves, which move logits by a hundredth: the best are further apart."""
    said = {}
    for name in ("reference", "metal-emulated"):
        with ops.only("reference"):     # what an engine sets stays in this block
            engine = open_mlx(Settings(ctx=1024, ops=name), tiny_path)
            session, said[name] = engine.open(1024), []
            engine.prefill(session, list(range(300, 340)))
            for _ in range(3):
                row = Row(session, Sampling(temperature=0.0), said[name][-1] if said[name] else None, tuple(said[name]))
                said[name].append(engine.decode([row])[0][0].token)
            engine.close()
    assert said["metal-emulated"] == said["reference"]
