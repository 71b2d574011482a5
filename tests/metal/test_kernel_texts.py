"""What a kernel's text may not hold, though the emulator would run it: only Apple's compiler would answer."""
import re
from importlib.resources import files
from pathlib import Path

import mlx.core as mx
import pytest

from ds4mlx.metal_kernels.emulator.source import ATTRIBUTES, COMMENTS

TEXTS = {file.name: file.read_text("ascii") for file in sorted(files("ds4mlx.metal_kernels").iterdir(), key=str)
         if file.name.endswith((".metal", ".h"))}
CODE = {name: COMMENTS.sub("", text) for name, text in TEXTS.items()}
# Functions and types of namespace metal, which all kernels use, by the language's specification. One of ours with such
# a name would be one more overload, or ambiguous.
METAL_NAMES = set("""abs absdiff access acos acosh address addsat all any array as_type asin asinh atan atan2 atanh
    atomic bias ceil clamp clz component coord copysign cos cosh cospi cross ctz determinant discard_fragment distance
    distance_squared divide dot exp exp10 exp2 extract_bits fabs fast fdim filter floor fma fmax fmax3 fmedian3 fmin
    fmin3 fmod fract frexp gradient2d gradient3d gradientcube hadd ilogb insert_bits isfinite isinf isnan isnormal
    isordered isunordered ldexp length length_squared level log log10 log2 mad24 madhi madsat matrix max max3 median3
    mem_flags memory_order mesh min min3 mix modf mul24 mulhi nextafter normalize numeric_limits popcount pow powr
    precise quad_broadcast quad_sum ray reflect refract reverse_bits rhadd rint rotate round rsqrt sampler saturate
    select sign signbit simd_all simd_any simd_ballot simd_broadcast simd_max simd_min simd_shuffle simd_sum sin sincos
    sinh sinpi smoothstep sqrt step subsat tan tanh tanpi tensor texture thread_scope threadgroup_barrier transpose
    trunc uniform vec""".split())
FUNCTION = re.compile(r"(?m)^\s*(?:template\s*<[^{};]*>\s*)?(?:inline|constexpr)\s"
                      r"[^=;{}()]*?(\w+)\s*(?:<[^(){};]*>)?\(")
TYPE = re.compile(r"\bstruct (\w+)")
APPROXIMATE = re.compile(r"(?<!precise::)(?<!fast::)\b(?:exp|exp2|exp10|log|log2|log10|sin|cos|tan|sinh|cosh|tanh|pow|"
                         r"powr|sqrt|rsqrt|divide|fmod)\s*\(")


@pytest.mark.parametrize("name", TEXTS)
def test_a_function_is_named_precise_or_fast(name):
    # Bare names mean either, by how MLX has a kernel compiled: "safe" arithmetic leaves the choice of functions open.
    assert APPROXIMATE.findall(CODE[name]) == []


@pytest.mark.parametrize("name", TEXTS)
def test_no_name_of_metal_is_given_to_something_else(name):
    ours = {*FUNCTION.findall(CODE[name]), *TYPE.findall(CODE[name])}
    assert ours or name.startswith(("dequantize", "latent"))    # these have only a body
    assert ours & METAL_NAMES == set()


@pytest.mark.parametrize("name", TEXTS)
def test_no_name_of_mlx_is_defined_again(name):
    kernels = Path(mx.__file__).parent / "include/mlx/backend/metal/kernels"
    prelude = "".join((kernels / f"{part}.h").read_text("utf-8") for part in ("bf16", "complex", "defines", "utils"))
    names = set(re.findall(r"\b(\w+)\(", prelude)) | set(re.findall(r"\b(?:struct|using|define|int) (\w+)", prelude))
    assert {"elem_to_loc", "Limits", "ceildiv", "simd_shuffle_up"} <= names
    assert {*FUNCTION.findall(CODE[name]), *TYPE.findall(CODE[name])} & names == set()


@pytest.mark.parametrize("name", TEXTS)
def test_attributes_are_whole_words(name):
    # MLX looks for their names anywhere in a body, and adds a parameter for each that it finds.
    inside = re.findall(rf"\w*(?:{'|'.join(ATTRIBUTES)})\w*", TEXTS[name])
    assert set(inside) <= set(ATTRIBUTES)


@pytest.mark.parametrize("name", TEXTS)
def test_a_ballot_becomes_64_bits_before_anything_else(name):
    assert CODE[name].count("simd_ballot(") == CODE[name].count("ulong(simd_ballot(")
