from ds4mlx.engine import protocol
from ds4mlx.sessions import identity


def test_the_engine_and_the_files_mean_the_same_by_a_span():
    """Neither layer may import the other; a save takes the engine's spans for the files' segments."""
    assert protocol.SPAN_TOKENS == identity.SPAN_TOKENS
