"""The text that is compiled: the signature that MLX writes around a kernel's body, and a launcher for the CPU."""
from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ds4mlx.metal_kernels.emulator.arrays import METAL_TYPES, dtype_name

if TYPE_CHECKING:
    from ds4mlx.metal_kernels.emulator.arrays import Dtype

    Template = Sequence[tuple[str, int | bool | Dtype]]

CONSTANT_BELOW = 8  # MLX passes inputs of fewer elements in the constant address space
HELPER_SITES = 40   # first number for threadgroup variables outside the body
ATTRIBUTES = {  # name -> Metal type, expression on the runtime's ids
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
COMMENTS = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_LAUNCHER = """struct Ids {
  unsigned pos_grid[3], pos_tg[3], tg_pos[3], tg_size[3], tg_size_full[3], grid[3], tg_count[3];
  unsigned lane, simd, index, simds, simds_full;
};
#define V(a) uint3(a[0], a[1], a[2])
extern "C" void msl_entry(void** b, const Ids* ids) {
  const Ids& i = *ids;
  (void)i;
  custom_kernel_NAME_TEMPLATE_(_VALUES_);
}
"""
_GROUP_VARIABLES = re.compile(
    r"(^|[;{}])\s*(?:alignas\(\d+\)\s*)?threadgroup\s+([A-Za-z_][\w:]*(?:<[^;{}()]*>)?)\s+"
    r"([A-Za-z_]\w*\s*(?:\[[^;,]*?\]\s*)*(?:,\s*[A-Za-z_]\w*\s*(?:\[[^;,]*?\]\s*)*)*);", re.S)
_DECLARATOR = re.compile(r"([A-Za-z_]\w*)\s*((?:\[[^;,]*?\]\s*)*)", re.S)


@dataclass(frozen=True, slots=True)
class KernelText:
    """What `metal_kernel` was given."""
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    source: str
    header: str
    atomic_outputs: bool

    @property
    def attributes(self) -> list[str]:
        """Those whose names occur in the body, as MLX finds them."""
        return [name for name in ATTRIBUTES if name in self.source]

    def shape_info(self, name: str) -> list[str]:
        """Which of shape, strides and ndim of an input the body mentions."""
        return [info for info in ("shape", "strides", "ndim") if f"{name}_{info}" in self.source]


@dataclass(frozen=True, slots=True)
class Instance:
    """One instantiation of a kernel: what depends on the arguments of a call."""
    template: str                # "template <typename T, int N>", or nothing
    template_values: str         # "<float, 64>"
    parameters: tuple[str, ...]  # as Metal sees them
    values: tuple[str, ...]      # what the launcher passes for each

    @property
    def buffers(self) -> int:
        """Arguments that take a place in the table of buffers."""
        return sum("[[buffer(" in parameter for parameter in self.parameters)


def instance(text: KernelText, arrays: Sequence[np.ndarray], dtypes: Sequence[str], output_dtypes: Sequence[str],
             template: Template) -> Instance:
    """The signature in MLX's order: each input with its shape, strides and ndim, then outputs, then attributes."""
    parameters, values = [], []

    def buffer(declaration: str, pointer: str, by_reference: bool = False) -> None:
        values.append(f"{'*' if by_reference else ''}({pointer})b[{len(parameters)}]")
        parameters.append(f"{declaration} [[buffer({len(parameters)})]]")

    for name, array, dtype in zip(text.inputs, arrays, dtypes, strict=True):
        element = f"const {'constant' if array.size < CONSTANT_BELOW else 'device'} {METAL_TYPES[dtype]}"
        buffer(f"{element}{'*' if array.ndim else '&'} {name}", f"{element}*", by_reference=not array.ndim)
        for info in text.shape_info(name) if array.ndim else ():
            integer = "const constant int64_t" if info == "strides" else "const constant int"
            single = info == "ndim"
            buffer(f"{integer}{'&' if single else '*'} {name}_{info}", f"{integer}*", by_reference=single)
    for name, dtype in zip(text.outputs, output_dtypes, strict=True):
        element = f"atomic<{METAL_TYPES[dtype]}>" if text.atomic_outputs else METAL_TYPES[dtype]
        buffer(f"device {element}* {name}", f"device {element}*")
    for name in text.attributes:
        parameters.append(f"{ATTRIBUTES[name][0]} {name} [[{name}]]")
        values.append(ATTRIBUTES[name][1])
    return Instance(*_template(template), tuple(parameters), tuple(values))


def _template(template: Template) -> tuple[str, str]:
    if not template:
        return "", ""
    kinds, values = [], []
    for name, value in template:
        kind = "bool" if isinstance(value, bool) else "int" if isinstance(value, int) else "typename"
        kinds.append(f"{kind} {name}")
        values.append(METAL_TYPES[dtype_name(value)] if kind == "typename" else str(value).lower())
    return f"template <{', '.join(kinds)}>\n", f"<{', '.join(values)}>"


def metal_source(text: KernelText, made: Instance) -> str:
    """What MLX would hand to Metal, but for its own prelude."""
    parameters = ",\n".join(f"  {parameter}" for parameter in made.parameters)
    return (f"{text.header}{made.template}[[kernel]] void custom_kernel_{text.name}(\n{parameters}) {{\n"
            f"{text.source}\n}}\n")


def unit(text: KernelText, made: Instance) -> str:
    """What clang compiles, after the shim. Lines of header and body keep their numbers, for messages."""
    launcher = _LAUNCHER.replace("NAME_", text.name).replace("TEMPLATE_", made.template_values)
    return "\n".join([
        f'#line 1 "{text.name}.header"', for_cpu(text.header, HELPER_SITES),
        f'#line 1 "{text.name}.signature"', f"{made.template}[[kernel]] void custom_kernel_{text.name}(",
        ",\n".join(made.parameters) + ") {", f'#line 1 "{text.name}.source"', for_cpu(text.source), "}",
        f'#line 1 "{text.name}.launcher"', launcher.replace("_VALUES_", ", ".join(made.values))])


def blank(match: re.Match[str]) -> str:
    """Spaces in place of a match; the line structure stays."""
    return re.sub(r"[^\n]", " ", match[0])


def for_cpu(body: str, first_site: int = 0) -> str:
    """Threadgroup variables become references to guarded memory of the threadgroup; vec<T, N>(...) a constructor."""
    sites = iter(range(first_site, first_site + 1000))

    def references(match: re.Match[str]) -> str:
        before, element, declarators = match.groups()
        made = []
        for name, dimensions in _DECLARATOR.findall(declarators.replace("\n", " ")):
            site = next(sites)
            alias = f"msl_tg_{name}_{site}"
            made.append(f"typedef {element} {alias} {dimensions}; threadgroup {alias}& {name} = "
                        f"msl::tg_var<{alias}>({site}, __LINE__);")
        return before + "\n" * match[0].count("\n") + " ".join(made)

    text, last = COMMENTS.sub(blank, body), None
    while text != last:  # neighbours share a delimiter, so go on until nothing changes
        last = text
        text = _GROUP_VARIABLES.sub(references, text)
    return re.sub(r"\b(?:metal::)?vec<\s*([\w:]+)\s*,\s*(\w+)\s*>\s*\(", r"msl::make<\1, \2>(", text)
