"""Kernel sources as one text, for a compiler that knows no folders. Without CuPy: both engines read them."""
import re
from functools import cache
from importlib import resources

Defines = tuple[tuple[str, int | str], ...]  # macros

INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


@cache
def source(stem: str) -> str:
    """kernels/`stem`.cu with our own headers pasted in, each once."""
    seen: set[str] = set()

    def paste(found: re.Match[str]) -> str:
        name = found.group(1)
        if name in seen:
            return ""
        seen.add(name)
        return INCLUDE.sub(paste, _text(name))

    return INCLUDE.sub(paste, _text(f"{stem}.cu"))


def _text(name: str) -> str:
    return resources.files("ds4mlx.cuda_port").joinpath("kernels", name).read_text("utf-8")
