"""The one place that imports CuPy, so that a machine without it is told what to install."""
from ds4mlx.errors import UsageError

try:
    import cupy
except ImportError as missing:
    raise UsageError("--engine cuda needs CuPy, which is not installed here; pip install 'ds4mlx[cuda]' for CUDA 13, "
                     "'ds4mlx[cuda12]' for CUDA 12, 'ds4mlx[rocm]' for ROCm") from missing

__all__ = ["cupy"]
