"""Run mx.fast.metal_kernel sources on the CPU.

``metal_kernel`` takes the arguments of ``mx.fast.metal_kernel`` and returns a
callable with the same keyword arguments, so a test can swap one for the other.
The Metal source is not translated: it is compiled by clang against metal_shim.h
and run by runtime.cpp, one fiber per thread.  See README.md for what this can and
cannot tell.
"""
from __future__ import annotations

import ctypes as C
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ds4mlx.config import cache_dir
from ds4mlx.metal_kernels.emulator.errors import (
    CompileError, DivergenceError, EmulatorError, EndlessLoopError, LimitError, OutOfBoundsError, RaceError, StrictError,
    UndefinedBehaviourError)

HERE = Path(__file__).resolve().parent
CONSTANT_BELOW = 8  # MLX passes inputs of fewer elements in the constant address space
ATTRIBUTES = {  # name -> (Metal type, expression on the runtime's ids)
    "dispatch_simdgroups_per_threadgroup": ("uint", "i.simds_full"),
    "dispatch_threads_per_threadgroup": ("uint3", "V(i.tg_size_full)"),
    "grid_size": ("uint3", "V(i.grid)"),
    "simdgroup_index_in_threadgroup": ("uint", "i.simd"),
    "simdgroups_per_threadgroup": ("uint", "i.simds"),
    "thread_execution_width": ("uint", "32u"),
    "thread_index_in_quadgroup": ("uint", "i.lane % 4"),
    "thread_index_in_simdgroup": ("uint", "i.lane"),
    "thread_index_in_threadgroup": ("uint", "i.index"),
    "thread_position_in_grid": ("uint3", "V(i.pos_grid)"),
    "thread_position_in_threadgroup": ("uint3", "V(i.pos_tg)"),
    "threadgroup_position_in_grid": ("uint3", "V(i.tg_pos)"),
    "threadgroups_per_grid": ("uint3", "V(i.tg_count)"),
    "threads_per_grid": ("uint3", "V(i.grid)"),
    "threads_per_simdgroup": ("uint", "32u"),
    "threads_per_threadgroup": ("uint3", "V(i.tg_size)"),
}
TYPES = {"bool": "bool", "uint8": "uint8_t", "uint16": "uint16_t", "uint32": "uint32_t", "uint64": "uint64_t",
         "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
         "float16": "float16_t", "float32": "float", "bfloat16": "bfloat16_t"}
BASE_FLAGS = ["-std=c++14", "-O2", "-g1", "-fPIC", "-fno-exceptions", "-fno-rtti", "-fno-strict-aliasing",
              "-march=native", "-Xclang", "-ffloat16-excess-precision=none", "-Xclang", "-fbfloat16-excess-precision=none",
              "-Xclang", "-cl-single-precision-constant", "-Wno-c++17-extensions", "-Wno-unknown-attributes",
              "-Wno-user-defined-literals", "-Wno-duplicate-decl-specifier", "-Wno-ignored-attributes",
              "-Wno-psabi", "-Werror=vla", "-Werror=return-type", "-ferror-limit=12"]
DEBUG_FLAGS = ["-DMSL_FLAT", "-fsanitize=array-bounds,alignment,shift-exponent,integer-divide-by-zero,float-cast-overflow",
               "-fsanitize-trap=all"]


_KINDS = {1: OutOfBoundsError, 2: DivergenceError, 3: UndefinedBehaviourError, 4: EndlessLoopError}


_checks = {"races": False, "debug": False}


@contextmanager
def checking(races: bool = False, debug: bool = False) -> Iterator[None]:
    """Within the block every call is made with `check_races=races` and `debug=debug` as well."""
    before = dict(_checks)
    _checks.update(races=races, debug=debug)
    try:
        yield
    finally:
        _checks.update(before)


# --------------------------------------------------------------------------- toolchain
def find_clang() -> str:
    names = [f"clang++-{v}" for v in range(25, 16, -1)] + ["clang++"]
    for n in filter(None, names):
        path = shutil.which(n)
        if path:
            return path
    raise CompileError("clang++ 17 or newer is needed : apt-get install clang-19")


def _cache_dir() -> Path:
    folder = cache_dir() / "metal-emulator"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    return folder


def _build(out: Path, args: list[str], src: Path | None = None, text: str | None = None) -> None:
    """Compile to a temporary name, then rename, so that parallel tests can share a cache."""
    tmp = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    if text is not None:
        src = out.with_suffix(".cpp")
        src.write_text(text)
    r = subprocess.run([find_clang(), *args, str(src), "-o", str(tmp)], capture_output=True, text=True)
    if r.returncode:
        raise CompileError(r.stderr)
    os.replace(tmp, out)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


# --------------------------------------------------------------------------- strict checks
_BUILTIN = set("bool char uchar short ushort int uint long ulong half bfloat float size_t void".split()) | {
    f"{s}{b}_t" for s in ("int", "uint") for b in (8, 16, 32, 64)} | {"float16_t", "bfloat16_t"}
_BUILTIN |= {f"{t}{n}" for t in "char uchar short ushort int uint long ulong half bfloat float".split() for n in (2, 3, 4)}
_SPACES = {"device", "constant", "threadgroup", "thread"}
_BANNED = {"double": "no double in Metal", "new": "no new", "delete": "no delete", "goto": "no goto", "try": "no exceptions",
           "throw": "no exceptions", "virtual": "no virtual functions", "dynamic_cast": "no RTTI", "typeid": "no RTTI",
           "std": "no std:: in Metal", "printf": "no printf", "thread_local": "no thread_local", "assert": "no assert"}
# Names that MLX's own prelude already defines before every custom kernel.
_MLX_NAMES = set("""elem_to_loc elem_to_loc_1 elem_to_loc_2 elem_to_loc_3 elem_to_loc_2_nd elem_to_loc_3_nd Limits WorkPerThread
LoopedElemToLoc ceildiv log1p hypot cast_to complex_t complex64_t ConditionalType schedule_row_tile bfloat16_to_uint16
uint16_to_bfloat16 float16_t bfloat16_t is_complex_v is_lane_convertible_v instantiate_kernel MTL_CONST os_log
REDUCE_N_READS REDUCE_N_WRITES SOFTMAX_N_READS RMS_N_READS RMS_LOOPED_LIMIT MAX_REDUCE_SPECIALIZED_DIMS""".split())


def _blank(text: str) -> str:
    """Comments and string literals replaced by spaces, line structure kept."""
    keep = lambda m: re.sub(r"[^\n]", " ", m.group())
    return re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', keep, text, flags=re.S)


def strict_lint(source: str, where: str, extra_types: set[str], program_scope: bool) -> list[str]:
    """What Apple's compiler refuses and clang's C++ mode would let pass."""
    found = []
    text = re.sub(r"(?m)^\s*#[^\n]*(\\\n[^\n]*)*", lambda m: re.sub(r"[^\n]", " ", m.group()), _blank(source))
    line_at = lambda pos: source.count("\n", 0, pos) + 1
    toks = [(m.group(), m.start()) for m in re.finditer(r"\w+|&&|\|\||->|::|<<|>>|[-+*/&|^=!<>]=|\S", text)]
    words = [t for t, _ in toks]
    types = set(_BUILTIN) | extra_types
    for k in range(len(words) - 1):
        if words[k] in ("struct", "typename", "class", "union", "using"):
            types.add(words[k + 1])
    types |= {m.group(1) for m in re.finditer(r"\btypedef\b[^;]*?(\w+)\s*(?:__attribute__[^;]*)?;", text)}
    if not source.isascii():  # MLX hands the text to Metal as ASCII
        found.append(f"{where}: not ASCII")
    for m in re.finditer(r"\[\s*[&=]?\s*\]\s*\(", text):
        found.append(f"{where}:{line_at(m.start())}: no lambdas in Metal")
    for k, (t, pos) in enumerate(toks):
        if program_scope and t in _MLX_NAMES and k and (words[k - 1] in types or words[k - 1] in ("struct", "using", "define")):
            found.append(f"{where}:{line_at(pos)}: MLX already defines '{t}'")
        if t == "static" and not {"constant", "inline"} & set(words[k + 1:k + 4]):
            found.append(f"{where}:{line_at(pos)}: a static variable must be in the constant address space")
        if t in _BANNED and not (k and words[k - 1] in (".", "->", "::")):
            found.append(f"{where}:{line_at(pos)}: {_BANNED[t]} ('{t}')")
        if t not in "*&" or not k:
            continue
        prev = words[k - 1]
        if not (prev in types or prev == "const" or prev in _SPACES):
            continue
        j, depth = k - 1, 0
        while j >= 0:  # back to the start of this declaration
            w = words[j]
            if w == ">": depth += 1
            elif w == "<":
                if depth == 0: break
                depth -= 1
            elif depth == 0 and w in ("(", ")", ",", ";", "{", "}", "=", "return", ":"): break
            j -= 1
        if not _SPACES & set(words[j + 1:k]):
            found.append(f"{where}:{line_at(pos)}: pointer or reference to '{prev}' has no address space "
                         "(device, constant, threadgroup or thread)")
    if program_scope:
        depth = 0
        start = 0
        for k, (t, pos) in enumerate(toks):
            if t == "{": depth += 1
            elif t == "}":
                depth -= 1
                if depth == 0 and words[k + 1:k + 2] != [";"]: start = k + 1
            if depth == 0 and t == ";":
                decl = words[start:k]
                head = decl[:decl.index("=")] if "=" in decl else decl
                first = head[0] if head else ""
                if head and first not in ("using", "typedef", "struct", "template", "static_assert", "enum", "namespace") \
                        and "(" not in head and "constant" not in head and len(head) > 1:
                    found.append(f"{where}:{line_at(toks[start][1])}: a program-scope variable must be in the constant address space")
                start = k + 1
        for m in re.finditer(r"(?<=[;{}])\s*threadgroup\s+[\w:<>, ]+?\w+\s*(\[[^;]*\])?\s*;", text):
            found.append(f"{where}:{line_at(m.start() + m.group().index('threadgroup'))}: threadgroup variables belong in the kernel body, not in a helper")
    return found


def _space_casts(unit: str, flags: list[str]) -> list[str]:
    """Explicit casts from one address space to another: legal in clang's C++, not in Metal."""
    r = subprocess.run([find_clang(), *flags, "-w", "-fsyntax-only", "-Xclang", "-ast-dump", "-fno-color-diagnostics",
                        "-x", "c++", "-"], input=unit, capture_output=True, text=True)
    if r.returncode: return []  # the real build reports it better
    found, file, line = [], "", "0"
    for row in r.stdout.splitlines():
        span = re.search(r"<((?:[^<>]*:\d+)+[^<>]*)>", row)
        begin = None
        for f, n in re.findall(r"([^<\s,]+):(\d+):\d+", row if span is None else span.group(1) + row[span.end():].split("'")[0]):
            if f != "line": file = f
            line = n
            begin = begin or (file, line)
        if "<AddressSpaceConversion>" in row and "Cast" in row and re.search(r"\.(source|header)$", file):
            to = re.search(r"'([^']*)'", row)
            found.append(f"{':'.join(begin or (file, line))}: cast to '{to.group(1)}' from another address space")
    return sorted(set(found))


_TG = re.compile(r"(^|[;{}])(\s*)(?:alignas\(\d+\)\s*)?threadgroup\s+([A-Za-z_][\w:]*(?:<[^;{}()]*>)?)\s+"
                 r"([A-Za-z_]\w*)\s*((?:\[[^;]*?\]\s*)*);", re.S)


def _rewrite(body: str, first_site: int = 0) -> str:
    """threadgroup variables become references into guarded, poisoned per-threadgroup memory."""
    sites = iter(range(first_site, first_site + 1000))

    def sub(m):
        pre, space, typ, name, dims = m.groups()
        k = next(sites)
        t = f"msl_tg_{name}_{k}"
        return (f"{pre}{space}typedef {typ} {t} {dims.strip()}; threadgroup {t}& {name} = "
                f"msl::tg_var<{t}>({k}, __LINE__);")

    out, last = body, None
    while out != last:  # neighbours share a delimiter, so go on until nothing changes
        last = out
        out = _TG.sub(sub, out)
    return re.sub(r"\b(?:metal::)?vec<\s*([\w:]+)\s*,\s*(\w+)\s*>\s*\(", r"msl::make<\1, \2>(", out)


# --------------------------------------------------------------------------- arrays
def _is_mlx(x) -> bool:
    return type(x).__module__.startswith("mlx.")


def _dtype_name(d) -> str:
    if d is bool: return "bool"
    s = str(d)
    if s.startswith("mlx.core."): return s[len("mlx.core."):]
    return np.dtype(d).name


def _to_numpy(x):
    """(bytes-compatible numpy array, dtype name); bfloat16 travels as uint16."""
    if _is_mlx(x):
        import mlx.core as mx
        name = _dtype_name(x.dtype)
        return (np.array(x.view(mx.uint16), copy=False) if name == "bfloat16" else np.array(x, copy=False)), name
    if isinstance(x, bool): return np.array(x), "bool"
    if isinstance(x, int): return np.array(x, np.int32), "int32"
    if isinstance(x, float): return np.array(x, np.float32), "float32"
    a = np.asarray(x)
    return a, a.dtype.name


class _Buffer(C.Structure):
    _fields_ = [("name", C.c_char * 64), ("lo", C.c_void_p), ("hi", C.c_void_p)]


class _Report(C.Structure):
    _fields_ = [("kind", C.c_int32), ("pc", C.c_uint64), ("text", C.c_char * 1600)]


class _Job(C.Structure):
    _fields_ = [("entry", C.c_void_p), ("buffers", C.c_void_p), ("ranges", C.POINTER(_Buffer)), ("n_buffers", C.c_int32),
                ("grid", C.c_uint32 * 3), ("tg", C.c_uint32 * 3), ("workers", C.c_int32), ("schedule", C.c_int32),
                ("seed", C.c_int32), ("timeout_s", C.c_int32), ("report", C.POINTER(_Report))]


class _Guarded:
    """One buffer ending at an inaccessible page; the bytes around it are a canary."""

    def __init__(self, lib, name, nbytes):
        self.lib, self.name, self.nbytes = lib, name, nbytes
        base, span = C.c_void_p(), C.c_size_t()
        self.ptr = lib.msl_alloc(nbytes, C.byref(base), C.byref(span))
        if not self.ptr: raise MemoryError(name)
        self.base, self.span = base.value, span.value
        self.view = np.ctypeslib.as_array((C.c_ubyte * max(nbytes, 1)).from_address(self.ptr))[:nbytes]
        lo, hi = self.base + 4096, self.base + self.span - 4096
        self.pads = [np.ctypeslib.as_array((C.c_ubyte * n).from_address(a))
                     for a, n in ((lo, self.ptr - lo), (self.ptr + nbytes, hi - self.ptr - nbytes)) if n]
        for p in self.pads: p[:] = 0xA5

    def check(self):
        for p in self.pads:
            if (p != 0xA5).any():
                raise OutOfBoundsError(f"out-of-bounds write next to buffer '{self.name}' ({self.nbytes} bytes)")

    def free(self):
        self.view = self.pads = None
        self.lib.msl_free(self.base, self.span)


# --------------------------------------------------------------------------- the kernel
class metal_kernel:
    """Drop-in for mx.fast.metal_kernel.

    Extra keyword arguments of the call: ``debug`` (sanitizer build: array bounds,
    alignment, shifts), ``strict`` (address-space and dialect checks, on by default),
    ``schedule`` ("forward", "reverse", "shuffle"), ``check_races`` (run all three and
    compare bits), ``workers``, ``timeout``.
    """

    def __init__(self, name, input_names, output_names, source, header="", ensure_row_contiguous=True,
                 atomic_outputs=False, compile_options=None):
        if not output_names: raise ValueError("must name at least one output")
        self.name, self.inputs, self.outputs = name, list(input_names), list(output_names)
        self.source, self.header = source, header
        self.contiguous, self.atomic = ensure_row_contiguous, atomic_outputs
        self.attributes = [a for a in ATTRIBUTES if a in source]
        self.shape_info = {n: [s for s in ("shape", "strides", "ndim") if f"{n}_{s}" in source] for n in self.inputs}
        self._loaded = {}

    # -- source generation, in MLX's order: input, its _shape/_strides/_ndim, ..., outputs, attributes
    def signature(self, arrays, dtypes, out_dtypes, template):
        params, args = [], []

        def add(decl, cast):
            args.append(cast.format(k=len(args)))
            params.append(f"  {decl} [[buffer({len(params)})]]")

        for n, a, d in zip(self.inputs, arrays, dtypes):
            space, t = ("constant" if a.size < CONSTANT_BELOW else "device"), TYPES[d]
            if a.ndim == 0: add(f"const {space} {t}& {n}", f"*(const {space} {t}*)b[{{k}}]")
            else: add(f"const {space} {t}* {n}", f"(const {space} {t}*)b[{{k}}]")
            for s in self.shape_info[n] if a.ndim else ():
                ty, op = {"shape": ("int", "*"), "strides": ("int64_t", "*"), "ndim": ("int", "&")}[s]
                add(f"const constant {ty}{op} {n}_{s}", ("*" if op == "&" else "") + f"(const constant {ty}*)b[{{k}}]")
        for n, d in zip(self.outputs, out_dtypes):
            t = f"atomic<{TYPES[d]}>" if self.atomic else TYPES[d]
            add(f"device {t}* {n}", f"(device {t}*)b[{{k}}]")
        for a in self.attributes:
            params.append(f"  {ATTRIBUTES[a][0]} {a} [[{a}]]")
            args.append(ATTRIBUTES[a][1])
        tdecl = tuse = ""
        if template:
            kinds = ["bool" if isinstance(v, bool) else "int" if isinstance(v, int) else "typename" for _, v in template]
            tdecl = "template <" + ", ".join(f"{k} {n}" for k, (n, _) in zip(kinds, template)) + ">\n"
            tuse = "<" + ", ".join(str(v).lower() if k != "typename" else TYPES[_dtype_name(v)]
                                   for k, (_, v) in zip(kinds, template)) + ">"
        return tdecl, tuse, params, args

    def metal_source(self, sig):
        tdecl, _, params, _ = sig
        return f"{self.header}\n{tdecl}[[kernel]] void custom_kernel_{self.name}(\n" + ",\n".join(params) + \
            ") {\n" + self.source + "\n}\n"

    def _unit(self, sig):
        tdecl, tuse, params, args = sig
        return "\n".join([
            '#include "metal_shim.h"', f'#line 1 "{self.name}.header"', _rewrite(self.header, 40),
            f'#line 1 "{self.name}.signature"', f"{tdecl}[[kernel]] void custom_kernel_{self.name}(",
            ",\n".join(params) + ") {", f'#line 1 "{self.name}.source"', _rewrite(self.source), "}",
            f'#line 1 "{self.name}.launcher"', "struct Ids { unsigned pos_grid[3], pos_tg[3], tg_pos[3], tg_size[3], tg_size_full[3], grid[3], tg_count[3], "
            "lane, simd, index, simds, simds_full; };", "#define V(a) uint3(a[0], a[1], a[2])",
            'extern "C" void msl_entry(void** b, const Ids* ids) { const Ids& i = *ids; (void)i;',
            f"  custom_kernel_{self.name}{tuse}({', '.join(args)}); }}", ""])

    def _load(self, sig, debug, strict):
        unit = self._unit(sig)
        key = _digest(unit, str(debug), str(strict))
        if key in self._loaded: return self._loaded[key]
        if strict:
            extra = {n for n in re.findall(r"(?:typename|class)\s+(\w+)", sig[0])}
            problems = strict_lint(self.header, f"{self.name}.header", extra, True)
            problems += strict_lint(self.source, f"{self.name}.source", extra | set(
                re.findall(r"\b(?:struct|class|typename|using)\s+(\w+)", self.header)), False)
            problems = problems or _space_casts(unit, [*BASE_FLAGS, "-I", str(HERE)])
            if problems: raise StrictError("\n".join(problems))
        shim, rt = (HERE / "metal_shim.h").read_text(), (HERE / "runtime.cpp").read_text()
        cc, cache = find_clang(), _cache_dir()
        runtime = cache / f"rt-{_digest(rt, cc)}.o"
        if not runtime.exists(): _build(runtime, ["-O2", "-std=c++17", "-fPIC", "-c"], src=HERE / "runtime.cpp")
        flags = [*BASE_FLAGS, "-I", str(HERE)]
        lib_path = cache / f"{self.name}-{_digest(unit, shim, rt, cc, ' '.join(flags), str(debug), str(strict))}.so"
        if not lib_path.exists():
            if strict and debug:  # the debug build is flat: check the address spaces first
                _build(lib_path.with_suffix(".o"), [*flags, "-c"], text=unit)
            try:
                _build(lib_path, [*flags, *(DEBUG_FLAGS if debug else []), "-shared", str(runtime)], text=unit)
            except CompileError as e:
                raise (StrictError if re.search("address.space", str(e)) else CompileError)(str(e)) from None
        lib = C.CDLL(str(lib_path))
        lib.msl_alloc.restype, lib.msl_alloc.argtypes = C.c_void_p, [C.c_size_t, C.c_void_p, C.c_void_p]
        lib.msl_free.argtypes = [C.c_void_p, C.c_size_t]
        lib.msl_run.argtypes = [C.POINTER(_Job)]
        self._loaded[key] = (lib, lib_path)
        return lib, lib_path

    def __call__(self, *, inputs, output_shapes, output_dtypes, grid, threadgroup, template=None, init_value=None,
                 verbose=False, stream=None, debug=False, strict=True, schedule="forward", seed=1, check_races=False,
                 workers=None, timeout_s=120, as_mlx=False, count=False, cache=None):
        debug, check_races = debug or _checks["debug"], check_races or _checks["races"]
        for got, want, what in ((inputs, self.inputs, "inputs"), (output_shapes, self.outputs, "output_shapes"),
                                (output_dtypes, self.outputs, "output_dtypes")):
            if len(got) != len(want): raise ValueError(f"expected {len(want)} {what}, got {len(got)}")
        grid, threadgroup = tuple(map(int, grid)), tuple(map(int, threadgroup))
        if min(grid) < 1 or min(threadgroup) < 1: raise ValueError("grid and threadgroup sizes must be positive")
        if int(np.prod([min(a, b) for a, b in zip(grid, threadgroup)])) > 1024:
            raise LimitError(f"{self.name}: threadgroup {threadgroup} is over 1024 threads")
        pairs = [_to_numpy(x) for x in inputs]
        arrays = [np.asarray(a, order="C") if self.contiguous else a for a, _ in pairs]
        out_names = [_dtype_name(d) for d in output_dtypes]
        sig = self.signature(arrays, [d for _, d in pairs], out_names, template)
        if verbose: print(self.metal_source(sig))
        lib, path = self._load(sig, debug, strict)
        modes = ("forward", "reverse", "shuffle") if check_races else (schedule,)
        results = [self._dispatch(lib, path, arrays, out_names, output_shapes, grid, threadgroup, init_value, m, seed,
                                  workers or os.cpu_count() or 1, timeout_s) for m in modes]
        for mode, other in zip(modes[1:], results[1:]):
            for n, a, b in zip(self.outputs, results[0], other):
                if a.tobytes() != b.tobytes():
                    raise RaceError(f"output '{n}' differs between forward and {mode} thread order: a missing barrier?")
        return [self._wrap(a, d, s, as_mlx or any(map(_is_mlx, inputs))) for a, d, s in zip(results[0], out_names, output_shapes)]

    @staticmethod
    def _wrap(raw, dtype, shape, as_mlx):
        a = raw.view(np.uint16 if dtype == "bfloat16" else dtype).reshape(shape)
        if as_mlx:
            import mlx.core as mx
            return mx.array(a).view(mx.bfloat16) if dtype == "bfloat16" else mx.array(a)
        return a if dtype != "bfloat16" else (a.astype(np.uint32) << 16).view(np.float32)

    def _dispatch(self, lib, path, arrays, out_names, shapes, grid, tg, init, mode, seed, workers, timeout):
        guards, keep, ptrs = [], [], []

        def place(name, data=None, nbytes=0):
            if data is not None and data.nbytes > 64 << 20 and data.flags.c_contiguous:  # too big to copy: used in place
                keep.append(data); ptrs.append(data.ctypes.data)
                guards.append((name, data.ctypes.data, data.nbytes, None)); return None
            g = _Guarded(lib, name, data.nbytes if data is not None else nbytes)
            if data is not None: g.view[:] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            guards.append((name, g.ptr, g.nbytes, g)); ptrs.append(g.ptr); return g

        try:
            for n, a in zip(self.inputs, arrays):
                if self.contiguous or a.flags.c_contiguous: place(n, a)
                else:  # strided view: hand over its own memory
                    keep.append(a); ptrs.append(a.ctypes.data); guards.append((n, a.ctypes.data, a.nbytes, None))
                for s in self.shape_info[n] if a.ndim else ():
                    place(f"{n}_{s}", {"shape": np.array(a.shape, np.int32), "ndim": np.array([a.ndim], np.int32),
                                       "strides": np.array([t // a.itemsize for t in a.strides], np.int64)}[s])
            outs = []
            for n, d, s in zip(self.outputs, out_names, shapes):
                size = int(np.prod(s, dtype=np.int64)) * (2 if d == "bfloat16" else np.dtype(d).itemsize)
                g = place(n, nbytes=size)
                if init is None: g.view[:] = 0xFF  # Metal leaves it uninitialised: poison (NaN for floats)
                elif d == "bfloat16": g.view[:] = np.full(size // 2, np.float32(init).view(np.uint32) >> 16, np.uint16).view(np.uint8)
                else: g.view[:] = np.full(size // np.dtype(d).itemsize, init, d).view(np.uint8)
                outs.append(g)
            ranges = (_Buffer * len(guards))(*[_Buffer(n.encode()[:63], p, p + b) for n, p, b, _ in guards])
            table, report = (C.c_void_p * len(ptrs))(*ptrs), _Report()
            job = _Job(C.cast(lib.msl_entry, C.c_void_p), C.cast(table, C.c_void_p), ranges, len(guards),
                       (C.c_uint32 * 3)(*grid), (C.c_uint32 * 3)(*tg), min(workers, 256),
                       ("forward", "reverse", "shuffle").index(mode), seed, timeout, C.pointer(report))
            rc = lib.msl_run(C.byref(job))
            if rc < 0: raise EmulatorError("could not start worker processes")
            if rc: raise _KINDS.get(report.kind, EmulatorError)(
                f"{self.name}: {report.text.decode(errors='replace')}{self._where(lib, path, report.pc)}")
            for _, _, _, g in guards:
                if g: g.check()
            return [g.view.copy() for g in outs]
        finally:
            for _, _, _, g in guards:
                if g: g.free()

    @staticmethod
    def _where(lib, path, pc):
        tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
        if not pc or not tool: return ""
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, _, _, *name = line.split(None, 5)
            lo, hi = (int(v, 16) for v in span.split("-"))
            if name and name[0] == str(path):
                out = subprocess.run([tool, "-i", "-e", str(path), hex(pc - lo)], capture_output=True, text=True).stdout
                for hit in out.splitlines():
                    if ".source:" in hit or ".header:" in hit: return f" at {Path(hit.split(' ')[0]).name}"
                return ""
        return ""

