import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.blocks import row_bytes

# Where the half-precision scales of a block lie: bytes of a block, offset of each scale's high byte.
SCALES = {"Q8_0": (34, [1]), "Q2_K": (84, [81, 83]), "Q4_K": (144, [1, 3]), "IQ2_XXS": (66, [1])}


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def random_blocks(rng):
    """random_blocks(kind, *shape): bytes that decode to finite weights of about unit size."""
    def make(kind, *shape):
        if kind in ("F32", "F16", "BF16"):
            values = rng.normal(size=shape).astype(np.float16 if kind == "F16" else np.float32)
            return values.view(np.uint8) if kind != "BF16" else np.ascontiguousarray(
                values.view(np.uint16)[..., 1::2]).view(np.uint8)
        raw = rng.integers(0, 256, (*shape[:-1], row_bytes(kind, shape[-1])), np.uint8)
        size, high = SCALES.get(kind, (17, []))
        blocks = raw.reshape(-1, size)
        blocks[:, high] = 0x20 + blocks[:, high] % 8   # 2^-7 to 2^-5, positive
        if kind == "MXFP4":
            blocks[:, 0] = 120 + blocks[:, 0] % 8
        return raw
    return make


@pytest.fixture(params=["reference", "cpu", "metal", "metal-emulated", "cuda"])
def implementation(request):
    """Every implementation that this machine can run; Metal's kernels in the emulator on any."""
    if request.param not in ("reference", "metal-emulated", ops.device()):
        pytest.skip(f"no {request.param} here")
    with ops.only(request.param):
        yield request.param


@pytest.fixture
def emulated():
    """Metal kernels, run by the emulator."""
    with ops.only("metal-emulated"):
        yield
