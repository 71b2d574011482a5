"""The engine over the stand-in, every launch checked against the parameters that its kernel declares.

    python launches.py MODEL.gguf CPP
"""
import ctypes
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import cupy as cp
import numpy as np

from ds4mlx.config import Settings
from ds4mlx.cuda_port import build
from ds4mlx.cuda_port import launch as launching
from ds4mlx.engine.protocol import Row, Sampling

ELEMENTS = {"float": np.float32, "int": np.int32, "u32": np.uint32, "double": np.float64, "__half": np.float16}
VALUES = {"float": float, "int": int, "bool": int, "long long": ctypes.c_longlong, "size_t": ctypes.c_size_t}
HELD = r'"griddepcontrol\.wait;"[^;]*;\s*asm volatile\("griddepcontrol\.launch_dependents;"\)'
launched: Counter[str] = Counter()
latest: list[object] = []       # the kernel launched last


@cache
def replaced(code: str, options: tuple[str, ...]) -> str:
    """A kernel's source once macros are replaced."""
    text = "\n".join(line for line in code.split("\n") if not line.startswith("#include <"))
    macros = [option for option in options if option.startswith("-D")]
    return subprocess.run([sys.argv[2], "-P", "-w", *macros, "-D__CUDA_ARCH__=900", "-"], input=text, text=True,
                          capture_output=True).stdout


@cache
def parameters(code: str, options: tuple[str, ...], name: str) -> list[str]:
    text = replaced(code, options)
    found = re.search(rf'extern "C" __global__[^;{{]*?\b{name}\s*\(([^{{]*?)\)\s*\{{', text, re.DOTALL)
    assert found, f"no kernel {name} with {options}"
    return [" ".join(part.split()) for part in found[1].split(",")]


def holds_its_turn() -> bool:
    """Whether what follows the kernel launched last begins only once all before that one is done."""
    parts = replaced(latest[0].code, tuple(latest[0].options)).split('extern "C" __global__')
    own = [part for part in parts[1:] if re.search(rf"\b{latest[0].name}\s*\(", part[:part.index("{")])]
    return "launch_dependents" not in re.sub(HELD, "", parts[0] + "".join(own))


def fits(parameter: str, argument: object) -> bool:
    kind = re.sub(r"\bconst\b|\b\w+$", "", parameter).strip()
    if kind.endswith("*"):
        element = ELEMENTS.get(kind[:-1].strip())
        return argument is None or isinstance(argument, cp.ndarray) and element in (None, argument.dtype)
    return isinstance(argument, VALUES.get(kind, ctypes.Structure))


def launch(kernel, grid, block, arguments, shared_bytes=0):
    if kernel is None:
        return
    declared = parameters(kernel.code, tuple(kernel.options), kernel.name)
    assert len(declared) == len(arguments), f"{kernel.name} takes {declared}, got {len(arguments)}"
    wrong = [(p, type(a)) for p, a in zip(declared, arguments) if not fits(p, a)]
    assert not wrong, f"{kernel.name}: {wrong}"
    assert all(isinstance(n, int) and n > 0 for n in (*grid, *block)) and np.prod(block) <= 1024
    assert shared_bytes <= launching.limits().of_block_bytes, f"{kernel.name} asks for {shared_bytes} bytes"
    launched[kernel.name] += 1
    latest[:] = [kernel]


launching.launch = launch   # before the operations import it
launching.active_clusters = lambda kernel, size, threads, shared_bytes: 120 // size


def main() -> None:
    from ds4mlx.cuda_port.engine import open_cuda
    for settings in ({}, {"kv_round": "none"}, {"quality": True}):
        told: list[tuple[int, int]] = []
        engine = open_cuda(Settings(ctx=4096, batched_session=2, **settings), Path(sys.argv[1]),
                           lambda *numbers: told.append(numbers))
        assert [done == total for done, total in told] == [False] * (len(told) - 1) + [True], "when a bar goes"
        known = build._module.cache_info().misses
        a, b = engine.open(4096), engine.open(4096)
        engine.prefill(a, [5] * 2600)
        a.mark()
        engine.prefill(b, [6])
        for token in range(4):
            engine.decode([Row(a, Sampling(temperature=0.0), token), Row(b, Sampling(), token, (token,))])
        engine.decode([Row(b, Sampling(top_k=3, logit_bias={7: 1.0}, banned=frozenset({1})), 9, (9,))])
        assert b.branch(a, 2601) == 2600 and a.rewind(2600) == 2600
        state = a.snapshot().head(0)
        b.restore(state)
        again = b.snapshot().head(0)
        assert all(np.array_equal(state[name], again[name]) for name in state)
        assert build._module.cache_info().misses == known, "a kernel was not compiled when the engine was opened"
        engine.close()
    print(len(launched))


if __name__ == "__main__":
    main()
