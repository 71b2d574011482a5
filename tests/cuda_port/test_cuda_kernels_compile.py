"""Every kernel compiles for the cards it is meant for, at the sizes of Flash: with nvcc, and with clang as HIP."""
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[2] / "cuda_port" / "kernels"
ROWS = "D=512 R=64 ROW=584 PACKED=1 RATIO=4 PAGE_ROWS=512 RING=136"
ATTEND = f"{ROWS} H=64 WIDTH=128 CHOSEN=1 STREAMS=4 HIDDEN=4096"
HYPER = "N=4 D=4096 M=24 FN_HALF=1"
DENSE = "PLAIN=0 K=4096 HAS_Q8=1 HAS_F16=1"
BATCH = "PLAIN=0 BATCH=1 HAS_Q8=1 HAS_F16=1 TOTALS=16 DEPTH=4 STAGED_BYTES=32768"
GATE_UP, DOWN = "GATE_UP=1 WIDTH=4096 ROWS=2048 SLOTS=6", "GATE_UP=0 WIDTH=2048 ROWS=4096 SLOTS=6"
TYPES = {"Q8_0": 8, "Q2_K": 10, "Q4_K": 12, "IQ2_XXS": 16, "BF16": 30, "MXFP4": 39}
OF_EXPERTS = ("Q2_K", "Q4_K", "IQ2_XXS", "MXFP4")

# Kernel file -> macros of each build that is tried.
CASES = {
    "dense_matmul": [f"{DENSE} VECTORS=1 PHASES=1 DEPTH=2 ROUNDS=4", f"{BATCH} K=1024 VECTORS=16 SHARES=1",
                     f"{DENSE} VECTORS=16 PHASES=2 DEPTH=2 ROUNDS=1", f"{BATCH} K=4096 VECTORS=8 SHARES=1",
                     *(f"PLAIN=1 K=512 KIND={kind}" for kind in (0, 1, *TYPES.values()))],
    "dequantize": [f"KIND={kind} WIDTH=4096 OUT=__half ARRANGED={int(kind == 8)}" for kind in (0, 1, *TYPES.values())],
    "expert_matmul": [f"FORM=3 KIND=16 MOST=1 DEPTH=2 TEAM=8 {GATE_UP}", f"FORM=3 KIND=10 MOST=16 DEPTH=3 {DOWN}",
                      f"FORM=3 KIND=16 MOST=16 DEPTH=2 TEAM=4 {GATE_UP}",
                      "FORM=2 OUT=float", "FORM=2 OUT=__half", *(
        f"FORM={form} KIND={TYPES[name]} {matrices}" for name in OF_EXPERTS for matrices in (GATE_UP, DOWN)
        for form in ("0 MOST=1 WIDE_CODEBOOK=0", "0 MOST=4 WIDE_CODEBOOK=0", "1 M=1", "1 M=4")),
        f"FORM=1 M=4 TILED=1 KIND=16 {GATE_UP}", f"FORM=1 M=4 TILED=1 KIND=10 {DOWN}"],
    "attend": [f"{ATTEND} STEP=1 KEYS=80 GROUPS=8 CLUSTERED=0 SLICES=8 BLOCKS=1",
               f"{ATTEND} STEP=0 HEADS=64 KEYS=64 GROUPS=16"],
    "latent": [f"{ROWS} Q=1024 INDEX_WIDTH=128 INDEX_ROW=68"],
    "compress": ["RATIO=4 M=2 W=512 R=64 INDEX=0 PACKED=1 PAGE_ROWS=512 ROW=584"],
    "hyper_mix": [f"{HYPER} STEP=1 CLUSTER=1 PAIRS=128 PASSES=16 TOKENS=1", f"{HYPER} STEP=0"],
    "route": ["E=256 K=6 STREAMS=4 HIDDEN=4096"],
    "indexer_topk": [f"H=64 W=128 R=64 PAGE_ROWS=512 {row}" for row in ("PACKED=1 ROW=68", "PACKED=0 ROW=512")],
    "rope_tail": ["KIND=1 D=4096 N=4", ""],
    "sample": ["V=129280 CLUSTER=1"],
}
# What only the larger cards have.
HOPPER = {
    "dense_matmul": [f"{BATCH} K=8192 VECTORS=16 SHARES=8", f"{BATCH} K=4096 VECTORS=8 SHARES=2"],
    "expert_matmul": [f"FORM=0 KIND=16 MOST={most} WIDE_CODEBOOK=1 {GATE_UP}" for most in (1, 4)],
    "attend": [f"{ATTEND} STEP=1 KEYS=80 GROUPS=8 CLUSTERED=1 SLICES=2 BLOCKS=2",
               *(f"{ATTEND} STEP=1 KEYS={keys} GROUPS=16 CLUSTERED=1 SLICES=2 BLOCKS=1" for keys in (64, 128))],
    "hyper_mix": [f"{HYPER} STEP=1 CLUSTER=8 PAIRS=128 PASSES=2 TOKENS=1",
                  "N=4 D=7168 M=24 FN_HALF=1 STEP=1 CLUSTER=7 PAIRS=128 PASSES=4 TOKENS=2"],
    "sample": ["V=129280 CLUSTER=8"],
    "route": ["E=256 K=6 STREAMS=4 HIDDEN=4096 CLUSTER=8", "E=16 K=4 STREAMS=4 HIDDEN=256 CLUSTER=8"],
    "indexer_topk": ["H=64 W=128 R=64 PAGE_ROWS=512 PACKED=1 ROW=68 CLUSTER=8"],
}

HEADERS = "#include <hip/hip_runtime.h>\n#include <hip/hip_fp16.h>\n"  # their parameters have names of our macros


def macros(case: str) -> list[str]:
    return [f"-D{macro}" for macro in case.split()]


def built(command: list[str], source: str = "") -> str:
    """What a compiler complains of."""
    result = subprocess.run(command, cwd=KERNELS, capture_output=True, text=True, input=source)
    return "" if result.returncode == 0 else f"{' '.join(command)}\n{source}\n{result.stderr[:2000]}"


@cache
def hip() -> list[str]:
    """Clang's command, empty where it cannot compile for ROCm. Headers are ROCM_PATH's, or those of .ci/get-hip."""
    clang = next(filter(None, map(shutil.which, (*(f"clang++-{n}" for n in range(21, 16, -1)), "clang++"))), None)
    if not clang:
        return []
    unpacked = Path(sys.prefix, "hip")
    path = [f"--rocm-path={unpacked}"] if unpacked.is_dir() and not os.environ.get("ROCM_PATH") else []
    command = [clang, "-x", "hip", "--offload-device-only", "--offload-arch=gfx1151", *path, "-nogpulib", "-S", "-o",
               "/dev/null"]
    return [] if built([*command, "-"], HEADERS) else command


def test_cuda_every_kernel_file_is_compiled_here():
    assert sorted(CASES) == sorted(path.stem for path in KERNELS.glob("*.cu"))


@pytest.mark.parametrize("stem", CASES)
@pytest.mark.parametrize("architecture", ["sm_90", *(pytest.param(name, marks=pytest.mark.slow)
                                                    for name in ("sm_120", "sm_121"))])
def test_cuda_kernels_compile_for_nvidia(stem, architecture):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here")
    for case in CASES[stem][:2 if architecture == "sm_90" else None]:
        assert not built(["nvcc", "-std=c++17", f"-arch={architecture}", "-cubin", "-o", "/dev/null", *macros(case),
                          f"{stem}.cu"])


@pytest.mark.slow
@pytest.mark.parametrize("stem", CASES)
def test_cuda_every_type_and_form_compiles_for_hopper(stem):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here")
    for case in [*CASES[stem], *HOPPER.get(stem, [])]:
        assert not built(["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-o", "/dev/null", *macros(case),
                          f"{stem}.cu"])


@pytest.mark.parametrize("stem", CASES)
@pytest.mark.parametrize("architecture, most", [  # 32 and 64 lanes in step
    ("gfx1151", 1), *(pytest.param(name, None, marks=pytest.mark.slow) for name in ("gfx1151", "gfx942"))])
def test_cuda_kernels_compile_for_amd(stem, architecture, most):
    if not hip():
        pytest.skip("no clang with HIP's headers here")
    command = [part.replace("gfx1151", architecture) for part in hip()]
    for case in CASES[stem][:most]:
        defines = "".join(f"#define {macro.replace('=', ' ')}\n" for macro in case.split())
        assert not built([*command, "-I.", "-std=c++17", "-"], f'{HEADERS}{defines}#include "{stem}.cu"\n')
