"""Compilers and what they made: libraries by content in the user's cache, shared by processes that run at once."""
from __future__ import annotations

import hashlib
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from ds4mlx.metal_kernels.emulator.errors import CompileError, EmulatorError, NoCompilerError

log = logging.getLogger(__name__)

SHIM = ("metal_shim.h", "metal_groups.h", "hooks.h", "tally.h")
RUNTIME = ("runtime.cpp", "fiber.h", "watch.h", "tally.h")
METAL_HEADERS = ("metal_stdlib", "metal_math", "metal_atomic", "metal_simdgroup", "metal_simdgroup_matrix")
FLAGS = (
    "-std=c++14", "-O1", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing", "-march=native",
    "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
    "-Xclang", "-cl-single-precision-constant", "-Wno-c++17-extensions", "-Wno-unknown-attributes",
    "-Wno-user-defined-literals", "-Wno-duplicate-decl-specifier", "-Wno-ignored-attributes", "-Wno-psabi",
    "-Werror=vla", "-Werror=return-type", "-ferror-limit=12")
# How the shim is compiled: plainly; flat, for sanitizers; watched, for instrumented kernels.
DIALECTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "flat": ("-DMSL_FLAT", "-fsanitize-trap=all",
             "-fsanitize=array-bounds,alignment,shift-exponent,integer-divide-by-zero,float-cast-overflow"),
    "watch": ("-DMSL_WATCH",)}
NEWEST, OLDEST = 25, 17


@dataclass(frozen=True)
class Compiler:
    """A clang++ by name, or the one inside the ziglang package, which keeps syntax trees and headers to itself."""
    command: tuple[str, ...]
    is_clang: bool = True

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the compiler and the processor, for binaries are made for the processor at hand."""
        path = Path(self.command[0]).resolve() if self.is_clang else Path(str(find_spec("ziglang").origin))
        made = path.stat()
        return digest(str(path), str(made.st_size), str(made.st_mtime_ns), _processor())

    def run(self, arguments: Sequence[str], text: str = "") -> str:
        """Standard output. Raises CompileError with the compiler's words."""
        done = subprocess.run([*self.command, *arguments], input=text, capture_output=True, text=True)
        if done.returncode:
            raise CompileError(done.stderr.strip() or f"{self.command[0]} ended with status {done.returncode}")
        return done.stdout


def _has_module(name: str) -> bool:
    return find_spec(name) is not None


def _clang_version(path: str) -> int:
    """Major version of a clang++, 0 for something else."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"clang version (\d+)", said)
    return int(found[1]) if found else 0


def find_compiler(which: Callable[[str], str | None] = shutil.which,
                  has_module: Callable[[str], bool] = _has_module,
                  version: Callable[[str], int] = _clang_version) -> Compiler:
    """The newest clang++ on the path, else the one inside the ziglang package. Raises NoCompilerError."""
    if not sys.platform.startswith("linux"):
        raise NoCompilerError(f"the Metal emulator runs on Linux, this is {sys.platform}; on a Mac run the kernels "
                              "themselves")
    for name in (f"clang++-{number}" for number in range(NEWEST, OLDEST - 1, -1)):
        if path := which(name):
            return Compiler((path,))
    if (path := which("clang++")) and version(path) >= OLDEST:
        return Compiler((path,))
    if has_module("ziglang"):
        log.warning("no clang++ found: compiling kernels with ziglang, slowly, blind to casts between address spaces")
        return Compiler((sys.executable, "-m", "ziglang", "c++"), is_clang=False)
    raise NoCompilerError(f"no clang++ {OLDEST} or newer was found, which the Metal emulator needs; install one: "
                          "apt-get install --no-install-recommends clang-19, or pip install ziglang")


@cache
def compiler() -> Compiler:
    """The one of this machine."""
    return find_compiler()


def digest(*parts: str) -> str:
    """A name for what is made of these texts."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


@cache
def shipped(names: tuple[str, ...]) -> dict[str, str]:
    """Texts of files beside this one."""
    folder = files("ds4mlx.metal_kernels.emulator")
    return {name: folder.joinpath(name).read_text("utf-8") for name in names}


@dataclass(frozen=True)
class Store:
    """A private folder of everything compiled so far. What is there is complete: it was renamed into place."""
    folder: Path

    @classmethod
    def open(cls, folder: Path) -> Store:
        """Make it where it is missing. Raises EmulatorError where that is impossible or others may write to it."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            found = folder.stat()
        except OSError as fault:
            raise EmulatorError(f"{folder}: compiled kernels cannot be kept there ({fault.strerror}); make room, or "
                                "set XDG_CACHE_HOME to a directory that can be written") from fault
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise EmulatorError(f"{folder}: compiled kernels are run, and others may write there; chmod 700 it, or set "
                                "XDG_CACHE_HOME to a directory of your own")
        return cls(folder)

    def has(self, name: str) -> bool:
        return (self.folder / name).exists()

    def note(self, name: str) -> None:
        """Leave an empty file that says something was done."""
        (self.folder / name).touch()

    def make(self, name: str, build: Callable[[Path], object]) -> Path:
        """The file of that name, built by `build(path)` when it is not there, whole or not at all."""
        path = self.folder / name
        if not path.exists():
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            try:
                build(part)
                part.replace(path)
            finally:
                part.unlink(missing_ok=True)
        return path

    @cached_property
    def shim(self) -> Path:
        """A folder of the shim's headers, copied so that what is precompiled from them outlives an installation."""
        texts = shipped(SHIM)
        folder = self.folder / f"shim-{digest(*texts.values())}"
        folder.mkdir(exist_ok=True, mode=0o700)
        inner = Store(folder)
        for name in METAL_HEADERS:
            inner.make(name, Path.touch)
        for name, text in texts.items():
            inner.make(name, lambda path, text=text: path.write_text(text, "utf-8"))
        return folder

    def flags(self, dialect: str, optimise: str = "-O1") -> list[str]:
        """Compile with these; the shim comes first, precompiled where the compiler can."""
        flags = [optimise if flag == "-O1" else flag for flag in (*FLAGS, *DIALECTS[dialect])] + ["-I", str(self.shim)]
        header = self.shim / "metal_shim.h"
        if not compiler().is_clang:
            return [*flags, "-include", str(header)]
        name = f"{self.shim.name}/{dialect}-{digest(compiler().fingerprint, *flags)}.pch"
        # Two processes may both have copied the header: what counts is its text, which its folder is named for.
        build = [*flags, "-Xclang", "-fno-pch-timestamp", "-x", "c++-header", str(header), "-o"]
        made = self.make(name, lambda part: compiler().run([*build, str(part)]))
        return [*flags, "-include-pch", str(made)]

    def runtime(self) -> Path:
        """The library that runs kernels."""
        joined = _joined("runtime.cpp", set())
        flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-x", "c++", "-", "-lm", "-o"]
        return self.make(f"runtime-{digest(joined, compiler().fingerprint)}.so",
                         lambda part: compiler().run([*flags, str(part)], joined))


def _joined(name: str, seen: set[str]) -> str:
    """A file of the runtime with those it includes in their places."""
    seen.add(name)
    return re.sub(r'#include "(.+)"\n|#pragma once\n',
                  lambda match: _joined(match[1], seen) if match[1] and match[1] not in seen else "",
                  shipped(RUNTIME)[name])


def link(objects: Path, library: Path) -> None:
    """A library from one object; what it lacks is found in the runtime. The linker alone is 25 ms quicker."""
    linker = shutil.which("ld")
    if linker and compiler().is_clang:
        done = subprocess.run([linker, "-shared", str(objects), "-o", str(library)], capture_output=True, text=True)
        if not done.returncode:
            return
    compiler().run(["-shared", "-nostdlib", str(objects), "-o", str(library)])


@cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return digest(platform.machine(), *(line for line in lines[:40] if line.lower().startswith(("flags", "features"))))
