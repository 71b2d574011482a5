"""Kernel sources to functions that a stream can launch: compiled on first use, for the device at hand."""
from functools import cache

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.source import Defines, source

OPTIONS = ("-std=c++17",)
HIP_HEADERS = "#include <hip/hip_runtime.h>\n#include <hip/hip_fp16.h>\n"  # whose parameters have names of our macros


@cache
def kernel(stem: str, entry: str, defines: Defines = (), shared_bytes: int = 0) -> "cp.RawKernel":
    """Function `entry` of kernels/`stem`.cu with sizes given as macros; call it with (grid, block, arguments).

    shared_bytes: of dynamic shared memory that launches will ask for, where that is more than the usual 48 KB.
    """
    function = _module(stem, defines).get_function(entry)
    if shared_bytes:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@cache
def _module(stem: str, defines: Defines) -> "cp.RawModule":
    if cp.cuda.runtime.is_hip:
        macros = "".join(f"#define {name} {value}\n" for name, value in defines)
        return cp.RawModule(code=HIP_HEADERS + macros + source(stem), options=OPTIONS, backend="nvrtc")
    options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines))
    return cp.RawModule(code=source(stem), options=options, backend="nvrtc")
