"""Operations that fail only when the device computes them, long after they were asked for."""
import mlx.core as mx
import numpy as np
import pytest
from state import whole
from talks import Talk, bench

from ds4mlx import ops
from ds4mlx.errors import CheckpointError

pytestmark = pytest.mark.skipif(ops.device() != "cpu", reason="what fails here does so on the CPU only")
LENGTHS = (3, 127, 250)     # of which the first two complete a row with their next token


@pytest.fixture
def own():
    """A model and sessions of its own, which nothing computes before it is evaluated."""
    with ops.only("reference"):
        yield bench()


@pytest.fixture
def failing(monkeypatch):
    """failing(): within the block no layer's experts can be computed."""
    def cannot(*args, real=ops.expert_down, **rest):
        half = mx.ones((64, 64), mx.float16)
        return real(*args, **rest) + mx.block_masked_mm(half, half, 64, mx.ones((1, 1), mx.bool_)).sum()

    def block():
        monkeypatch.setattr(ops, "expert_down", cannot)
        return pytest.raises(RuntimeError, match="only supports float32")

    yield block


def stepped(own, monkeypatch, failing):
    """Sessions that have decoded, the last time in vain."""
    talks = [Talk(own.branch(length)) for length in LENGTHS]
    own.step(talks)
    with failing():
        own.step(talks)
    monkeypatch.undo()
    return talks


def test_where_no_row_was_to_be_written_all_go_on(own, monkeypatch, failing):
    talks = [Talk(own.branch(length)) for length in (1, 125)]
    own.step(talks)
    with failing():
        own.step(talks)
    monkeypatch.undo()
    own.step(talks)
    assert [talk.said for talk in talks] == [own.alone(length, 2)[0] for length in (1, 125)]


def test_sessions_that_lost_their_rows_are_refused(own, monkeypatch, failing):
    talks = stepped(own, monkeypatch, failing)
    for talk in talks:
        assert len(talk.session.tokens) in LENGTHS
        with pytest.raises(ValueError, match="lost its rows .* open another one"):
            own.step([talk])
        with pytest.raises(ValueError, match="lost its rows"):
            own.open().branch(talk.session, 2)
        with pytest.raises(CheckpointError):
            talk.session.snapshot().head(0)


def test_what_begins_after_a_loss_finds_a_working_engine(own, monkeypatch, failing):
    state, expected = whole(own.base(127)), own.alone(127, 5)[0]
    lost, *others = stepped(own, monkeypatch, failing)
    for other in others:
        other.session.close()
    lost.session.restore(state)
    fresh = Talk(own.prefilled(state["tokens"].tolist()))
    again = Talk(lost.session)
    for _ in range(5):
        own.step([fresh, again])
    assert fresh.said == again.said == expected


def test_a_prefill_that_the_device_cannot_compute_costs_the_rows_but_not_the_engine(own, monkeypatch, failing):
    session, tokens = own.prefilled([5] * 77), own.base(127).tokens
    with failing():
        session.feed([5] * 9)
    monkeypatch.undo()
    assert session.tokens == [5] * 77 and session.marks == [] and session.rewind(77) == 0
    session.feed(tokens)
    np.testing.assert_array_equal(session.logits(), bench().prefilled(tokens).logits())
