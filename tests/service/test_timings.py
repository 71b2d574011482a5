"""Rates come from the moments they lie between."""
from ds4mlx.service.metrics import Timings


def test_rates_are_tokens_over_their_phase():
    timings = Timings(queued=0.0, started=1.0, prefilled=3.0, first_token=3.5, finished=5.5)
    assert timings.prefill_tps(100) == 50.0
    assert timings.decode_tps(21) == 10.0  # twenty tokens after the first, in two seconds
    assert timings.total_s == 5.5


def test_a_phase_that_was_not_reached_has_no_rate():
    assert Timings(queued=0.0, finished=1.0).prefill_tps(5) == Timings(queued=0.0).decode_tps(5) == 0.0
