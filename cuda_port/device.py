"""The one place that imports CuPy, so that a machine without it, or without a card, is told what it lacks."""
import threading

from ds4mlx.errors import UsageError

LEAST_BLOCK_BYTES = 64 * 1024   # of shared memory, that every kernel has a form for
EXTRAS = "pip install 'ds4mlx[cuda]' for CUDA 13, 'ds4mlx[cuda12]' for CUDA 12, 'ds4mlx[rocm]' for ROCm"

try:
    import cupy
except ModuleNotFoundError as missing:
    raise UsageError(f"--engine cuda needs CuPy, and its {missing.name} is not installed here; {EXTRAS}") from missing
except ImportError as fault:
    raise UsageError(f"--engine cuda: CuPy is installed here, and cannot be loaded ({fault}); {EXTRAS}") from fault


def _require_card() -> None:
    """Raises UsageError where no kernel could be compiled or launched."""
    runtime = cupy.cuda.runtime
    try:
        cards = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as fault:
        driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        if not driver:
            raise UsageError("--engine cuda needs a card and its driver, and no driver is installed here; install it, "
                             "or leave out --engine cuda") from fault
        if driver // 1000 < needed // 1000:
            raise UsageError(f"--engine cuda: the driver is of CUDA {_version(driver)}, the CuPy that is installed "
                             f"needs {needed // 1000}; update the driver, or {EXTRAS}") from fault
        raise UsageError(f"--engine cuda: no card can be used ({fault}); see what nvidia-smi or rocminfo tells, and "
                         "CUDA_VISIBLE_DEVICES") from fault
    if not cards:
        raise UsageError("--engine cuda: the driver shows no card; see what nvidia-smi or rocminfo tells, and "
                         "CUDA_VISIBLE_DEVICES")
    if not runtime.is_hip:
        try:
            cupy.cuda.nvrtc.getVersion()
        except (ImportError, OSError, RuntimeError) as fault:
            raise UsageError("--engine cuda: CUDA's compiler of kernels, NVRTC, is not found here; "
                             "pip install 'ds4mlx[cuda]' brings it, or set CUDA_PATH to a toolkit") from fault
    if of_block_bytes() < LEAST_BLOCK_BYTES:
        raise UsageError(f"--engine cuda: a block has {of_block_bytes() // 1024} KB of shared memory on this card, "
                         f"kernels need {LEAST_BLOCK_BYTES // 1024}; leave out --engine cuda")


def of_block_bytes() -> int:
    """Shared memory that a block can have on the current device."""
    attributes = cupy.cuda.Device().attributes
    return attributes.get("MaxSharedMemoryPerBlockOptin") or attributes["MaxSharedMemoryPerBlock"]


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


_require_card()
_streams = threading.local()


def use_stream() -> "cupy.cuda.Stream":
    """From here on this thread's work goes to its own stream: one, for all engines that it opens."""
    if not hasattr(_streams, "stream"):
        _streams.stream = cupy.cuda.Stream(non_blocking=True)
    return _streams.stream.use()


__all__ = ["cupy", "of_block_bytes", "use_stream"]
