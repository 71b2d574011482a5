"""Kernel sources to functions that a stream can launch: compiled for the device at hand on first use, or ahead."""
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.source import Defines, source

OPTIONS = ("-std=c++17",)
HIP_HEADERS = "#include <hip/hip_runtime.h>\n#include <hip/hip_fp16.h>\n"  # whose parameters have names of our macros
AT_ONCE = 16    # modules, at most: each takes a compiler some hundred MB

_here = threading.local()   # `asked`: modules of a thread that compiles ahead


def kernel(stem: str, entry: str, defines: Defines = (), shared_bytes: int = 0) -> "cp.RawKernel | None":
    """Function `entry` of kernels/`stem`.cu with sizes given as macros; call it with (grid, block, arguments). None,
    which `launch` does nothing with, in `ahead`.

    shared_bytes: of dynamic shared memory that launches will ask for, where that is more than the usual 48 KB.
    """
    asked = getattr(_here, "asked", None)
    if asked is None:
        return compiled(stem, entry, defines, shared_bytes)
    asked(stem, defines)
    return None


@contextmanager
def ahead() -> Iterator[dict[tuple[str, Defines], "Future[None]"]]:
    """Modules whose kernels this thread asks for in here are compiled until the end of it, several at a time; nothing
    is launched. One after another, a second or two each, a model's would take minutes."""
    device, found = cp.cuda.Device().id, {}

    def compile_module(stem: str, defines: Defines) -> None:
        with cp.cuda.Device(device):
            _module(stem, defines).compile()

    with ThreadPoolExecutor(min(os.cpu_count() or 1, AT_ONCE)) as pool:
        def asked(stem: str, defines: Defines) -> None:
            if (stem, defines) not in found:
                found[stem, defines] = pool.submit(compile_module, stem, defines)

        _here.asked = asked
        try:
            yield found
        finally:
            _here.asked = None
    for future in found.values():
        future.result()


@cache
def compiled(stem: str, entry: str, defines: Defines, shared_bytes: int) -> "cp.RawKernel":
    """The function itself, in `ahead` too."""
    function = _module(stem, defines).get_function(entry)
    if shared_bytes:
        function.max_dynamic_shared_size_bytes = shared_bytes
    return function


@cache
def _module(stem: str, defines: Defines) -> "cp.RawModule":
    # Not as options: CuPy asks the compiler about every set of those anew, for each kernel that its cache has, too.
    macros = "".join(f"#define {name} {value}\n" for name, value in defines)
    headers = HIP_HEADERS if cp.cuda.runtime.is_hip else ""
    return cp.RawModule(code=headers + macros + source(stem), options=OPTIONS, backend="nvrtc")
