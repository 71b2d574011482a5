"""Puts a call before every access to device, constant and threadgroup memory, in the text of LLVM's language.

Address spaces are part of a pointer's type there, so which accesses count is known from the text alone, whatever their
width; accesses that a thread makes to its own memory are left alone. A form that is not understood is an error, so none
goes uncounted. The text is optimised code, before vectorisation: what any compiler merges counts once.
"""
from __future__ import annotations

import re
from collections.abc import Iterator

from ds4mlx.metal_kernels.emulator.errors import EmulatorError

_SPACE = r"ptr addrspace\(([123])\) "
_LOAD = re.compile(rf"^  %[-\w.\"$]+ = load (?:volatile |atomic )?(.+?), {_SPACE}(.*)$")
_STORE = re.compile(rf"^  store (?:volatile |atomic )?(.+), {_SPACE}(.*)$")
_COPY = re.compile(r"^  (?:tail |musttail |notail )?call void @llvm\.mem(?:cpy|move|set)(?:\.inline)?\.[\w.]+\((.*)\)")
_DEBUG = re.compile(r", (!dbg !\d+)")
_OTHER = re.compile(r"^  (?:%\S+ = )?(?:(?:tail )?call .*@llvm\.(?:masked|vp|experimental\.vp)\.|atomicrmw |cmpxchg )"
                    r".*addrspace\([123]\)")
_SIZES = {"half": 2, "bfloat": 2, "float": 4, "double": 8, "ptr": 8}
_ELEMENTS = re.compile(r"^[<\[](\d+) x (.+)[>\]]$")
_OPERAND = re.compile(_SPACE + r"(?:(?:align \d+|noundef|nonnull|noalias|readonly|writeonly|captures\(none\)|nocapture|"
                      r"dereferenceable(?:_or_null)?\(\d+\)) )*(.*)$")


def instrument(code: str) -> str:
    """The module with its calls. Raises EmulatorError for an access that cannot be counted."""
    lines: list[str] = []
    sites = 0
    for line in code.splitlines():
        for way, space, pointer, size in _accesses(line):
            debug = _DEBUG.search(line)
            site = f"ptr getelementptr inbounds (i32, ptr @msl_sites, i64 {sites})"
            lines.append(f"  call void @msl_{way}_{space}(ptr addrspace({space}) {pointer}, i64 {size}, {site})"
                         + (f", {debug[1]}" if debug else ""))
            sites += 1
        lines.append(line)
    return "\n".join([*lines, f"@msl_sites = internal global [{max(sites, 1)} x i32] zeroinitializer", ""])


def _accesses(line: str) -> Iterator[tuple[str, str, str, int | str]]:
    """(read or write, address space, pointer, bytes) of each access that a line makes."""
    if load := _LOAD.match(line):
        yield "read", load[2], _value(load[3]), size_bytes(load[1])
    elif store := _STORE.match(line):
        yield "write", store[2], _value(store[3]), size_bytes(_value_type(store[1]))
    elif (copy := _COPY.match(line)) and "addrspace" in copy[1]:
        target, source, size, *_ = _arguments(copy[1])
        for way, operand in (("write", target), ("read", source)):
            if pointer := _OPERAND.match(operand):
                yield way, pointer[1], pointer[2], size.removeprefix("i64 ").removeprefix("i32 ")
    elif _OTHER.match(line):
        raise EmulatorError(f"an access of a form that cannot be counted: {line.strip()}")


def size_bytes(kind: str) -> int:
    """Bytes that a load or store of a type moves: "<4 x float>" is 16."""
    if kind in _SIZES:
        return _SIZES[kind]
    if kind.startswith("i") and kind[1:].isdigit():
        return (int(kind[1:]) + 7) // 8
    elements = _ELEMENTS.match(kind)
    if not elements:
        raise EmulatorError(f"an access of a type that cannot be counted: {kind}")
    if elements[2].startswith("i") and elements[2][1:].isdigit():
        return (int(elements[1]) * int(elements[2][1:]) + 7) // 8
    return int(elements[1]) * size_bytes(elements[2])


def _value(text: str) -> str:
    """The operand that a text begins with: a name, or an expression in parentheses."""
    return _arguments(text)[0]


def _value_type(text: str) -> str:
    """The type in "<2 x float> %7" or "i32 0"."""
    if text[0] not in "<[{":
        return text.split(" ", 1)[0]
    depth = 0
    for end, letter in enumerate(text):
        depth += (letter in "<[{") - (letter in ">]}")
        if depth == 0:
            return text[:end + 1]
    return text


def _arguments(text: str) -> list[str]:
    """Parts between commas that stand in no parentheses."""
    parts, depth, start = [], 0, 0
    for end, letter in enumerate(text):
        depth += (letter in "([{<") - (letter in ")]}>")
        if letter == "," and depth == 0:
            parts.append(text[start:end].strip())
            start = end + 1
    return [*parts, text[start:].strip()]
