"""The card that MLX computes on: what its kernels may ask for, and machine code for it, by MLX's own NVRTC."""
from ctypes import CDLL, byref, c_char_p, c_int, c_size_t, c_void_p, create_string_buffer
from functools import cache
from pathlib import Path

import mlx.core as mx

from ds4mlx.cuda_port.forms import Limits

HOPPER = Limits(132, 233472, 232448)
ATTRIBUTES = 16, 81, 97     # of the driver: multiprocessors, shared memory of one of them, and of a block at most
CAPABILITY = 75, 76         # of the driver: the compute capability's numbers


@cache
def limits() -> Limits:
    """Of the card; of a Hopper card where there is none."""
    found = [_attribute(which) for which in ATTRIBUTES]
    return Limits(*found) if None not in found else HOPPER


def _attribute(which: int) -> int | None:
    """Of the first card, None where there is none."""
    try:
        driver, value = CDLL("libcuda.so.1"), c_int()
    except OSError:
        return None
    return None if driver.cuInit(0) or driver.cuDeviceGetAttribute(byref(value), which, 0) else value.value


def compiled(text: str) -> bytes:
    """Machine code for the card at hand. Raises RuntimeError with what the compiler says."""
    nvrtc, program, size = _nvrtc(), c_void_p(), c_size_t()
    major, minor = (_attribute(which) for which in CAPABILITY)
    options = ["-std=c++17", f"-arch=sm_{major or 9}{minor or 0}", *(f"-I{folder}" for folder in _include_folders())]
    nvrtc.nvrtcCreateProgram(byref(program), text.encode(), None, 0, None, None)
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (c_char_p * len(options))(*map(str.encode, options)))
    ask, give = ((nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog) if failed else
                 (nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN))
    ask(program, byref(size))
    result = create_string_buffer(size.value)
    give(program, result)
    nvrtc.nvrtcDestroyProgram(byref(program))
    if failed:
        raise RuntimeError(f"a CUDA kernel does not compile: {result.value.decode()[:2000]}")
    return result.raw


@cache
def _nvrtc() -> CDLL:
    """The library that MLX itself has loaded."""
    for version in ("13", "12"):
        try:
            return CDLL(f"libnvrtc.so.{version}")
        except OSError:
            continue
    raise RuntimeError("MLX's CUDA kernels need NVRTC, and there is no libnvrtc.so here; install nvidia-cuda-nvrtc")


@cache
def _include_folders() -> list[str]:
    """Where cuda_fp16.h and what it includes lie: beside NVRTC, or in a toolkit."""
    _nvrtc()
    lines = Path("/proc/self/maps").read_text().splitlines()
    loaded = {Path(line.split()[-1]) for line in lines if "libnvrtc.so" in line}
    roots = [*(path.resolve().parents[1] for path in loaded), Path("/usr/local/cuda")]
    folders = [root / "include" for root in roots] + [Path(mx.__file__).parent / "include"]
    return [str(folder) for base in folders for folder in (base, base / "cccl") if folder.is_dir()]
