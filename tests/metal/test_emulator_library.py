"""Functions of the Metal standard library, as its specification defines them."""
import numpy as np
import pytest

LANES = np.arange(32)


@pytest.fixture
def value(emulate):
    """value(*expressions): what each is, as floats; x is 64 ones."""
    def run(*expressions, before=""):
        body = "".join(f"y[{k}] = float({expression});\n" for k, expression in enumerate(expressions))
        return emulate(before + body, n=1)[:len(expressions)].tolist()
    return run


@pytest.fixture
def lanes(emulate):
    """lanes(expression): its value in each lane of one SIMD-group; `i` is the lane."""
    return lambda expression: emulate(f"y[i] = float({expression});", n=32)[:32].tolist()


def test_minimum_and_maximum_of_floats_pass_over_a_nan(value):
    found = value("max(NAN, 1.0f)", "min(1.0f, NAN)", "fmax(half(NAN), 2.0h)", "clamp(NAN, 3.0f, 4.0f)",
                  "saturate(NAN)", "isnan(max(NAN, NAN))", "max3(1.0f, NAN, 2.0f)", "fmin3(3.0f, 1.0f, NAN)",
                  "median3(3, 1, 2)")
    assert found == [1, 1, 2, 3, 0, 1, 2, 1, 2]


def test_signs_of_zero_are_kept(value):
    found = value("1.0f / sign(-0.0f)", "1.0f / abs(-0.0f)", "sign(NAN)", "sign(-3.0h)", "signbit(-0.0f)",
                  "1.0f / copysign(0.0f, -2.0f)")
    assert found == [-np.inf, np.inf, 0, -1, 1, -np.inf]


def test_rounding_goes_by_name(value):
    assert value("round(2.5f)", "rint(2.5f)", "rint(3.5h)", "trunc(-1.5f)", "floor(-1.5f)", "ceil(-1.5f)",
                 "fract(-0.25f)", "fract(-1e-10f)") == [3, 2, 4, -1, -2, -1, 0.75, 1 - 2 ** -24]


def test_numbers_are_taken_apart_and_put_together(value):
    before = "int k; float whole, c; float f = frexp(12.0f, k), p = modf(-2.75f, whole), s = sincos(0.0f, c);\n"
    assert value("f", "k", "p", "whole", "s", "c", "ldexp(0.75f, 4)", "ilogb(12.0f)", "smoothstep(0.0f, 4.0f, 1.0f)",
                 before=before) == [0.75, 4, -0.75, -2, 0, 1, 12, 3, 0.15625]


def test_bits_are_counted_in_their_own_width(value):
    assert value("popcount(uchar(255))", "popcount(short(-1))", "popcount(-1l)", "clz(uchar(1))", "clz(0u)", "clz(1ul)",
                 "ctz(ushort(8))", "ctz(0ul)", "reverse_bits(uchar(1))", "reverse_bits(1u) == 0x80000000u",
                 "popcount(uint2(3, 7)).y") == [8, 16, 64, 7, 32, 63, 3, 64, 128, 1, 3]


def test_integer_functions_do_not_overflow(value):
    assert value("addsat(uchar(200), uchar(100))", "addsat(char(-100), char(-100))", "subsat(3u, 5u)",
                 "subsat(char(100), char(-100))", "hadd(uchar(255), uchar(254))", "rhadd(uchar(255), uchar(254))",
                 "absdiff(char(-100), char(100))", "mulhi(0x80000000u, 4u)", "mulhi(1l << 62, 8l)", "mulhi(-1, 2)",
                 "rotate(uchar(0x81), uchar(1))", "extract_bits(-256, 8u, 8u)", "extract_bits(0xabcdu, 4u, 8u)",
                 "insert_bits(0u, 0xffu, 4u, 4u)") == [255, -128, 0, 127, 254, 255, 200, 2, 2, -1, 3, -1, 0xBC, 0xF0]


def test_limits_of_types(value):
    assert value("numeric_limits<short>::min()", "numeric_limits<uchar>::max()", "numeric_limits<half>::max()",
                 "numeric_limits<float>::lowest() == -FLT_MAX", "numeric_limits<bfloat>::epsilon()",
                 "numeric_limits<int>::digits", "numeric_limits<half>::infinity()", "HALF_MAX", "INT_MIN"
                 ) == [-32768, 255, 65504, 1, 2 ** -7, 31, np.inf, 65504, -2 ** 31]


def test_vectors_are_built_taken_apart_and_reinterpreted(value):
    assert value("float4(1, float2(2, 3), 4).zw.y", "uchar4(7).w", "as_type<uchar4>(0x04030201u).z",
                 "as_type<float>(0x3f800000u)", "as_type<uint2>(0x100000002ul).x", "as_type<half2>(0x3c004000u).y",
                 "select(int2(1, 2), int2(3, 4), int2(1, 2) > int2(1, 1)).y", "select(1, 2, true)",
                 "dot(float3(1, 2, 3), float3(4, 5, 6))", "vec<float, 2>(5, 6).y", "any(int2(0, 1))", "all(int2(0, 1))",
                 "cross(float3(1, 0, 0), float3(0, 1, 0)).z") == [4, 7, 3, 1, 2, 1, 4, 2, 32, 6, 1, 0, 1]


def test_normalised_integers_are_packed_lowest_first(value):
    assert value("unpack_unorm4x8_to_float(0x0000ff33u).x", "unpack_unorm4x8_to_float(0x0000ff33u).y",
                 "unpack_snorm4x8_to_float(0x80u).x", "unpack_snorm2x16_to_float(0x7fff0000u).y",
                 "pack_float_to_unorm4x8(float4(1, 0.2f, -1, 2)) == 0xff0033ffu",
                 "pack_float_to_snorm2x16(float2(-1, 0)) == 0x00008001u") == [pytest.approx(0.2), 1, -1, 1, 1, 1]


@pytest.mark.parametrize("expression, expected", [
    ("simd_sum(i)", [496] * 32), ("simd_max(int(i) - 40)", [-9] * 32), ("simd_min(half(i))", [0] * 32),
    ("simd_product(i < 3 ? 2.0f : 1.0f)", [8] * 32), ("simd_or(1u << (i % 8))", [255] * 32),
    ("simd_prefix_inclusive_sum(i)", LANES.cumsum()), ("simd_prefix_exclusive_sum(i)", LANES.cumsum() - LANES),
    ("simd_shuffle(i, 31 - i)", LANES[::-1]), ("simd_shuffle_xor(i, 5)", LANES ^ 5),
    ("simd_shuffle_down(i, 3)", np.where(LANES + 3 < 32, LANES + 3, LANES)),
    ("simd_shuffle_up(i, 3)", np.where(LANES >= 3, LANES - 3, LANES)),
    ("simd_shuffle_rotate_down(i, 3)", (LANES + 3) % 32), ("simd_shuffle_rotate_up(i, 3)", (LANES - 3) % 32),
    ("simd_shuffle_and_fill_down(i, i + 100, 3)", np.where(LANES < 29, LANES + 3, LANES - 29 + 100)),
    ("simd_shuffle_and_fill_up(i, i + 100, 3)", np.where(LANES >= 3, LANES - 3, LANES + 29 + 100)),
    ("simd_shuffle_and_fill_up(i, i + 100, 1, 8)", np.where(LANES % 8, LANES - 1, LANES + 7 + 100)),
    ("simd_broadcast(i, 7)", [7] * 32), ("simd_broadcast_first(i + 1)", [1] * 32),
    ("ulong(simd_ballot(i < 4))", [15] * 32), ("simd_all(i < 32)", [1] * 32), ("simd_any(i > 31)", [0] * 32),
    ("simd_is_first()", LANES == 0), ("quad_sum(i)", LANES // 4 * 16 + 6), ("quad_broadcast(i, 2)", LANES // 4 * 4 + 2),
    ("quad_shuffle_xor(i, 1)", LANES ^ 1)])
def test_lanes_exchange_values(lanes, expression, expected):
    assert lanes(expression) == list(expected)


def test_a_returned_lane_takes_no_part_in_a_sum(emulate):
    assert emulate("if (i >= 20) { return; }\ny[i] = simd_sum(1u);", n=32)[:20].tolist() == [20] * 20


def test_a_filled_and_a_diagonal_matrix_have_a_product(emulate):
    body = """simdgroup_matrix<half, 8, 8> a(2.0h);
    simdgroup_matrix<half, 8, 8> b = make_filled_simdgroup_matrix<half, 8, 8>(3.0h);
    simdgroup_matrix<float, 8, 8> c;
    simdgroup_load(c, x, 8, ulong2(0, 0), true);
    simdgroup_multiply_accumulate(c, a, b, c);
    simdgroup_store(c, y, 8, ulong2(0, 0), true);"""
    x = np.arange(64, dtype=np.float32)
    assert emulate(body, x=x, n=32).tolist() == (x + 6).tolist()
