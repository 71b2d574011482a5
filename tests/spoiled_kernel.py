"""Kernels with a mistake in them, to see that it is found."""
from contextlib import contextmanager

from ds4mlx.ops import kernel as launching


@contextmanager
def spoiled(file, text, mistake):
    """Within the block metal_kernels/FILE has `mistake` where it has `text`."""
    original = launching._text

    def read(name):
        source = original(name)
        assert name != file or text in source
        return source.replace(text, mistake) if name == file else source
    launching.kernel.cache_clear()
    launching._text = read
    try:
        yield
    finally:
        launching._text = original
        launching.kernel.cache_clear()
