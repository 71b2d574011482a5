"""What Apple's compiler refuses and clang's C++ would let pass.

A lint of the text, by tokens, and a search of clang's syntax tree for casts between address spaces. Neither is Apple's
front end: recursion, function pointers and member functions of types in device memory are not judged.
"""
from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ds4mlx.metal_kernels.emulator.source import COMMENTS, blank

_SCALARS = ("char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "half", "bfloat", "float")
_TYPES = {*_SCALARS, *(f"{scalar}{n}" for scalar in _SCALARS for n in (2, 3, 4)), "bool", "size_t", "void",
          *(f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)), "float16_t", "bfloat16_t"}
_SPACES = {"device", "constant", "threadgroup", "thread"}
_BANNED = {"double": "no double in Metal", "new": "no new", "delete": "no delete", "goto": "no goto",
           "try": "no exceptions", "throw": "no exceptions", "virtual": "no virtual functions",
           "dynamic_cast": "no RTTI", "typeid": "no RTTI", "std": "no std:: in Metal", "printf": "no printf",
           "thread_local": "no thread_local", "assert": "no assert"}
# Names that MLX's own prelude defines before every custom kernel.
_MLX_NAMES = set("""elem_to_loc elem_to_loc_1 elem_to_loc_2 elem_to_loc_3 elem_to_loc_2_nd elem_to_loc_3_nd Limits
    WorkPerThread LoopedElemToLoc ceildiv log1p hypot cast_to complex_t complex64_t ConditionalType schedule_row_tile
    bfloat16_to_uint16 uint16_to_bfloat16 float16_t bfloat16_t is_complex_v is_lane_convertible_v instantiate_kernel
    MTL_CONST os_log REDUCE_N_READS REDUCE_N_WRITES SOFTMAX_N_READS RMS_N_READS RMS_LOOPED_LIMIT
    MAX_REDUCE_SPECIALIZED_DIMS""".split())
_TOKEN = re.compile(r"\w+|&&|\|\||->|::|<<|>>|[-+*/&|^=!<>]=|\S")
_DIRECTIVE = re.compile(r"(?m)^\s*#[^\n]*(\\\n[^\n]*)*")
_STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
_GROUP_VARIABLE = re.compile(r"(?<=[;{}])\s*(threadgroup)\s+[\w:<>, ]+?\w+\s*(\[[^;]*\])?\s*;")
_LAMBDA = re.compile(r"\[\s*[&=]?\s*\]\s*\(")


@dataclass(frozen=True, slots=True)
class _Text:
    """Tokens of a text without comments, strings and directives."""
    where: str
    text: str
    words: tuple[str, ...]
    starts: tuple[int, ...]
    types: frozenset[str]

    def at(self, start: int, problem: str) -> str:
        return f"{self.where}:{self.text.count(chr(10), 0, start) + 1}: {problem}"


def lint(header: str, body: str, name: str, template: str) -> list[str]:
    """Problems of a kernel's text, each with file and line: "axpy.source:3: no lambdas in Metal"."""
    parameters = set(re.findall(r"(?:typename|class)\s+(\w+)", template))
    above = _read(header, f"{name}.header", parameters)
    inside = _read(body, f"{name}.source", parameters | above.types)
    problems = [f"{text.where}: not ASCII, which is how MLX hands it to Metal"
                for text, raw in ((above, header), (inside, body)) if not raw.isascii()]
    if re.search(r"(//|^\s*#)[^\n]*\Z", header, re.M):
        problems.append(f"{above.where}: the last line needs its newline, for MLX writes the kernel right behind it")
    for text in (above, inside):
        problems += [*_words(text), *_pointers(text)]
    return problems + [*_redefined(above), *_program_scope(above)]


def _read(raw: str, where: str, types: set[str]) -> _Text:
    text = _DIRECTIVE.sub(blank, _STRING.sub(blank, COMMENTS.sub(blank, raw)))
    found = [(match[0], match.start()) for match in _TOKEN.finditer(text)]
    words = tuple(word for word, _ in found)
    named = {after for before, after in zip(words, words[1:], strict=False)
             if before in ("struct", "typename", "class", "union", "using", "enum") and after.isidentifier()}
    named |= set(re.findall(r"\btypedef\b[^;]*?(\w+)\s*(?:__attribute__[^;]*)?;", text))
    return _Text(where, text, words, tuple(start for _, start in found), frozenset(_TYPES | types | named))


def _words(text: _Text) -> Iterator[str]:
    """Words that Metal does not have."""
    for match in _LAMBDA.finditer(text.text):
        yield text.at(match.start(), "no lambdas in Metal")
    for k, (word, start) in enumerate(zip(text.words, text.starts, strict=True)):
        if word == "static" and not {"constant", "inline"} & set(text.words[k + 1:k + 4]):
            yield text.at(start, "a static variable must be in the constant address space")
        if word in _BANNED and not (k and text.words[k - 1] in (".", "->", "::")):
            yield text.at(start, f"{_BANNED[word]} ('{word}')")


def _pointers(text: _Text) -> Iterator[str]:
    """Pointers and references that name no address space."""
    for k, word in enumerate(text.words):
        if word not in ("*", "&") or not k:
            continue
        before = text.words[k - 1]
        if before not in text.types and before != "const" and before not in _SPACES:
            continue
        if not _SPACES & set(text.words[_declaration_start(text.words, k):k]):
            yield text.at(text.starts[k], f"pointer or reference to '{before}' has no address space "
                                          "(device, constant, threadgroup or thread)")


def _declaration_start(words: tuple[str, ...], k: int) -> int:
    depth = 0
    for j in range(k - 1, -1, -1):
        if words[j] == ">":
            depth += 1
        elif words[j] == "<":
            if depth == 0:
                return j + 1
            depth -= 1
        elif depth == 0 and words[j] in ("(", ")", ",", ";", "{", "}", "=", "return", ":"):
            return j + 1
    return 0


def _redefined(text: _Text) -> Iterator[str]:
    for k, word in enumerate(text.words):
        if word in _MLX_NAMES and k and (text.words[k - 1] in text.types or text.words[k - 1] in ("struct", "using")):
            yield text.at(text.starts[k], f"MLX already defines '{word}'")


def _program_scope(text: _Text) -> Iterator[str]:
    """Variables outside functions that are not constants."""
    depth = start = 0
    for k, word in enumerate(text.words):
        if word == "{":
            depth += 1
        elif word == "}":
            depth -= 1
            if depth == 0 and text.words[k + 1:k + 2] != (";",):
                start = k + 1
        elif depth == 0 and word == ";":
            if _is_variable(text.words[start:k]):
                yield text.at(text.starts[start], "a program-scope variable must be in the constant address space")
            start = k + 1
    for match in _GROUP_VARIABLE.finditer(text.text):
        yield text.at(match.start(1), "threadgroup variables belong in the kernel's body, not in a helper")


def _is_variable(declaration: tuple[str, ...]) -> bool:
    head = declaration[:declaration.index("=")] if "=" in declaration else declaration
    other = ("using", "typedef", "struct", "template", "static_assert", "enum", "namespace")
    return len(head) > 1 and head[0] not in other and not {"(", "constant"} & set(head)


def space_casts(tree: str) -> list[str]:
    """Casts from one address space to another in clang's syntax tree: legal in its C++, not in Metal.

    A row of the tree leaves out what has not changed since the row before: file, then line.
    """
    found: set[str] = set()
    file, line = "", "0"
    for row in tree.splitlines():
        span = re.search(r"<((?:[^<>]*:\d+)+[^<>]*)>", row)
        begin = None
        places = row if span is None else span[1] + row[span.end():].split("'")[0]
        for name, number in re.findall(r"([^<\s,]+):(\d+):\d+", places):
            file, line = file if name == "line" else name, number
            begin = begin or (file, line)
        if "<AddressSpaceConversion>" in row and "Cast" in row and re.search(r"\.(source|header)$", file):
            target = re.search(r"'([^']*)'", row)
            place = ":".join(begin or (file, line))
            found.add(f"{place}: cast to '{target[1] if target else '?'}' from another address space")
    return sorted(found)
