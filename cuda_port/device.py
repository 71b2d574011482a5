"""The one place that imports CuPy, so that a machine without it is told what to install."""
import threading

from ds4mlx.errors import UsageError

try:
    import cupy
except ImportError as missing:
    raise UsageError("--engine cuda needs CuPy, which is not installed here; pip install 'ds4mlx[cuda]' for CUDA 13, "
                     "'ds4mlx[cuda12]' for CUDA 12, 'ds4mlx[rocm]' for ROCm") from missing

_streams = threading.local()


def use_stream() -> "cupy.cuda.Stream":
    """From here on this thread's work goes to its own stream: one, for all engines that it opens."""
    if not hasattr(_streams, "stream"):
        _streams.stream = cupy.cuda.Stream(non_blocking=True)
    return _streams.stream.use()


__all__ = ["cupy", "use_stream"]
