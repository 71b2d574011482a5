"""From a kernel's text to a loaded library, by way of the checks that a compiler for CPUs does not make."""
from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from ds4mlx.metal_kernels.emulator import launch, strict
from ds4mlx.metal_kernels.emulator.errors import CompileError, StrictError
from ds4mlx.metal_kernels.emulator.instrument import instrument
from ds4mlx.metal_kernels.emulator.source import Instance, KernelText, unit
from ds4mlx.metal_kernels.emulator.toolchain import Store, compiler, digest, link, shipped, SHIM


@cache
def library(store: Store, text: KernelText, made: Instance, dialect: str, is_strict: bool) -> launch.Library:
    """The kernel compiled as `dialect` (a name in toolchain.DIALECTS), or taken from the store.

    Raises StrictError for what Apple's compiler would refuse, CompileError for what clang refuses.
    """
    code = unit(text, made)
    if is_strict:
        _check(store, text, made, code, dialect)
    name = digest(code, dialect, compiler().fingerprint, *store.flags(dialect), *shipped(("tally.h",)).values())
    build = _watched if dialect == "watch" else _plain
    path = store.make(f"{text.name[:100]}-{name}.so", lambda part: build(store, code, dialect, part))
    launch.runtime(store)
    return launch.load(path, dialect == "watch")


def _check(store: Store, text: KernelText, made: Instance, code: str, dialect: str) -> None:
    """Once for a text and its signature; a flat build is blind to address spaces, so for it once for each template."""
    if dialect == "flat":
        what = code
    else:
        what = "\0".join([text.header, text.source, made.template, *made.parameters])
    stamp = f"checked-{digest(what, text.name, compiler().fingerprint, *shipped((*SHIM, 'strict.py')).values())}"
    if store.has(stamp):
        return
    problems = strict.lint(text.header, text.source, text.name, made.template)
    if not problems:
        problems = strict.space_casts(_syntax_tree(store, code))
    if problems:
        raise StrictError("\n".join(problems))
    store.note(stamp)


def _syntax_tree(store: Store, code: str) -> str:
    if not compiler().is_clang:  # it gives none, but address spaces are checked when it compiles
        with TemporaryDirectory() as folder:
            return _compile([*store.flags("plain"), "-w", "-c", "-x", "c++", "-", "-o", f"{folder}/checked.o"], code)
    wanted = ["-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics"]
    return _compile([*store.flags("plain"), "-w", *wanted, "-x", "c++", "-"], code)


def _compile(arguments: list[str], code: str) -> str:
    try:
        return compiler().run(arguments, code)
    except CompileError as fault:
        kind = StrictError if re.search("address.space", str(fault)) else CompileError
        raise kind(str(fault)) from None


def _plain(store: Store, code: str, dialect: str, part: Path) -> None:
    made = part.with_suffix(".o")
    try:
        _compile([*store.flags(dialect), "-c", "-x", "c++", "-", "-o", str(made)], code)
        link(made, part)
    finally:
        made.unlink(missing_ok=True)


def _watched(store: Store, code: str, dialect: str, part: Path) -> None:
    text, made = part.with_suffix(".ll"), part.with_suffix(".o")
    try:
        _compile([*store.flags(dialect), "-S", "-emit-llvm", "-x", "c++", "-", "-o", str(text)], code)
        text.write_text(instrument(text.read_text("utf-8")), "utf-8")
        _compile(["-O2", "-g1", "-fPIC", "-Wno-override-module", "-c", str(text), "-o", str(made)], "")
        link(made, part)
    finally:
        text.unlink(missing_ok=True)
        made.unlink(missing_ok=True)
