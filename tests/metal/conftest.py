import numpy as np
import pytest

from ds4mlx.metal_kernels.emulator import NoCompilerError, metal_kernel
from ds4mlx.metal_kernels.emulator.toolchain import compiler


@pytest.fixture(scope="session", autouse=True)
def a_compiler():
    try:
        compiler()
    except NoCompilerError as fault:
        pytest.skip(str(fault))


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.fixture
def emulate():
    """emulate(body): what `n` threads in threadgroups of `group` make of input x (64 ones) in output y [64] float32.

    The body's line 1 has the thread's index: `i`.
    """
    def run(body, *, x=None, header="", n=64, group=None, shape=(64,), dtype=np.float32, template=(), **options):
        x = np.ones(64, np.float32) if x is None else x
        kernel = metal_kernel("small", ["x"], ["y"], f"uint i = thread_position_in_grid.x;\n{body}", header=header)
        (y,) = kernel(inputs=[x], grid=(n, 1, 1), threadgroup=(group or n, 1, 1), template=template,
                      output_shapes=[shape], output_dtypes=[dtype], **options)
        return y
    return run
