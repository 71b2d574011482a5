"""The CUDA engine on a file of Flash's full shape, against what ds4 itself answers on it.

    python -m pytest -m slow -s tests/slow/test_cuda_full_shape.py          a minute; 3.4 GiB of disk and on the card
"""
import pytest
from slow.ds4_answers import answering, compare

from ds4mlx.config import Settings

pytestmark = pytest.mark.slow
cupy = pytest.importorskip("cupy", exc_type=ImportError)


@pytest.fixture(scope="module", params=[False, True], ids=["fast", "quality"])
def logits(request, flash_path):
    """logits(name): of the first token of the answer to that text."""
    if not cupy.cuda.is_available():
        pytest.skip("no card here")
    from ds4mlx.cuda_port.engine import open_cuda
    engine = open_cuda(Settings(ctx=2048, quality=request.param), flash_path)
    yield answering(engine, flash_path)
    engine.close()


def test_cuda_hello_is_as_near_to_ds4_as_its_own_engines_are(logits):
    shared, *_ = compare(logits("hello"), "hello")
    assert shared >= 7


def test_cuda_italian_chooses_among_the_same_tokens(logits):
    shared, _, theirs, ours = compare(logits("italian_175"), "italian_175")
    assert shared >= 18 and theirs == ours
