"""Each op's CUDA kernels against its reference, at shapes that they are made for. On a card alone."""
import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.gguf.dequant import dequantize

pytestmark = pytest.mark.skipif(ops.device() != "cuda", reason="no CUDA card here")

BYTES = 5e-5    # activations of 16 bits in blocks of 256, relative to the largest result
HALVES = 5e-4   # factors rounded to 11 bits, in sums of hundreds
EXACT = 3e-6    # float32 in another order
SLOTS, EPS = 6, 1e-6


def near(found, expected, tolerance):
    found, expected = np.array(found, np.float64), np.array(expected, np.float64)
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def both(run):
    """What `run` gives by kernels, and by the reference."""
    with ops.only("cuda"):
        found = run()
        mx.eval(found)
    with ops.only("reference"):
        return found, run()


@pytest.fixture
def normal(rng):
    return lambda *shape: mx.array(rng.normal(size=shape).astype(np.float32))


@pytest.fixture
def tables(rng):
    def make(tokens):
        turn = rng.normal(size=(tokens, 32))
        return mx.array(np.cos(turn).astype(np.float32)), mx.array(np.sin(turn).astype(np.float32))
    return make


@pytest.mark.parametrize("tokens", [1, 4, 16])
def test_products_of_a_few_tokens(tokens, random_blocks, normal):
    raws, x = {kind: random_blocks(kind, 512, 4096) for kind in ("Q8_0", "F16")}, normal(tokens, 4096)
    with ops.only("cuda"):
        ys = ops.dense_matmuls(x, [ops.arrange(ops.Blocks(mx.array(raw), kind)) for kind, raw in raws.items()])
    for y, (kind, raw) in zip(ys, raws.items(), strict=True):
        near(y, np.array(x, np.float64) @ dequantize(raw, kind).T, BYTES)


def test_groups_of_rows_for_many_tokens(random_blocks, normal):
    raw, x = random_blocks("Q8_0", 1024, 512), normal(40, 8 * 512)
    with ops.only("cuda"):
        y = ops.dense_matmul(x, ops.arrange(ops.Blocks(mx.array(raw), "Q8_0")), groups=8)
    w = dequantize(raw, "Q8_0").reshape(8, 128, 512)
    expected = np.einsum("tgk,gnk->tgn", np.array(x, np.float64).reshape(40, 8, 512), w)
    near(y, expected.reshape(40, 1024), HALVES)     # TF32, as below


def test_arranged_rows_decode_to_the_same_weights(random_blocks):
    raw = random_blocks("Q8_0", 64, 512)
    with ops.only("cuda"):
        y = ops.dense_matmul(mx.eye(512), ops.arrange(ops.Blocks(mx.array(raw), "Q8_0")))
    near(y.T, dequantize(raw, "Q8_0"), HALVES)      # TF32, where MLX has that on


@pytest.mark.parametrize("kinds", [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K"), ("MXFP4", "MXFP4")], ids=str)
@pytest.mark.parametrize("tokens", [1, 5, 40, 300])
def test_experts(tokens, kinds, random_blocks, normal, rng):
    shapes = {"up": (kinds[0], 8, 256, 4096), "down": (kinds[1], 8, 256, 2048), "shared": ("Q8_0", 256, 4096),
              "last": ("Q8_0", 256, 2048)}
    plain = {name: ops.Blocks(mx.array(random_blocks(*shape)), shape[0]) for name, shape in shapes.items()}
    selected = mx.array(np.stack([np.sort(rng.permutation(8)[:SLOTS]) for _ in range(tokens)]).astype(np.int32))
    x, weight, mid = normal(tokens, 4096) * 0.1, normal(tokens, SLOTS), normal(tokens, SLOTS + 1, 2048)

    def run():
        w = {name: ops.arrange(blocks) for name, blocks in plain.items()}
        return (ops.expert_gate_up(x, selected, weight, w["up"], w["up"], 10.0, (w["shared"], w["shared"])),
                ops.expert_down(mid, selected, w["down"], w["last"]))
    (found_mid, found), (expected_mid, expected) = both(run)
    near(found, expected, BYTES if tokens <= 32 else HALVES)
    # Gate times up doubles an error, and the largest of both are where the sums cancel least.
    error = np.array(found_mid) - np.array(expected_mid)
    assert np.sqrt(np.mean(error ** 2) / np.mean(np.array(expected_mid) ** 2)) < (4e-4 if tokens <= 32 else 4e-3)


@pytest.mark.parametrize("ratio, chosen", [(0, False), (4, False), (4, True), (128, False)])
@pytest.mark.parametrize("positions", [[5000], [4095, 5000, 2100]], ids=str)
def test_a_step_s_attention(positions, ratio, chosen, normal, tables, rng):
    B, page_rows = len(positions), 2048 // (ratio or 4)
    windows = ops.fp8_pack(normal(B, 128, 512), 64)
    pages = mx.array(np.stack([rng.permutation(6)[:3] for _ in range(B)]).astype(np.int32))
    pool = ops.Paged(ops.fp8_pack(normal(6 * page_rows, 512), 64), pages, page_rows) if ratio else None
    picks = [np.sort(rng.permutation((p + 1) // 4)[:512]) for p in positions] if chosen else []
    inputs = normal(B, 64 * 512), *tables(B), windows, mx.array(positions, mx.int32), pool, \
        (max(positions) + 1) // ratio if ratio else 0, mx.array(np.stack(picks).astype(np.int32)) if chosen else None, \
        ratio, normal(64), EPS
    near(*both(lambda: ops.attention_step(*inputs)), HALVES)


@pytest.mark.parametrize("tokens, start, ratio, chosen", [(40, 0, 0, False), (40, 5000, 4, True), (300, 2000, 4, False),
                                                          (200, 5000, 128, False)])
def test_a_chunk_s_attention(tokens, start, ratio, chosen, normal, tables, rng):
    rows = ops.fp8_pack(normal((start + tokens) // ratio, 512), 64) if ratio else None
    picks = [np.sort(rng.permutation((start + j + 1) // 4)[:512]) for j in range(tokens)] if chosen else []
    window = ops.fp8_pack(normal(tokens + min(start, 127), 512), 64)
    inputs = normal(tokens, 64 * 512), *tables(tokens), window, start, rows, \
        mx.array(np.stack(picks).astype(np.int32)) if chosen else None, ratio, normal(64), 128, EPS
    near(*both(lambda: ops.attention(*inputs)), HALVES)


@pytest.mark.parametrize("tokens", [1, 40])
def test_the_indexer_s_scores_and_choices(tokens, normal, tables):
    q, weight, turn = normal(tokens, 64, 128), normal(tokens, 64), tables(tokens)
    rows, positions = ops.fp4_pack(normal(1300, 128)), mx.arange(5000, 5000 + tokens, dtype=mx.int32)

    def run():
        return ops.index_scores(ops.index_queries(q, *turn, True), weight, rows, 0.5, positions)
    found, expected = both(run)
    seen = np.arange(1300) < (np.array(positions)[:, None] + 1) // 4
    near(np.where(seen, found, 0), np.where(seen, expected, 0), EXACT)
    chosen, best = both(lambda: ops.select_rows(expected, positions, 4, 512))
    np.testing.assert_array_equal(np.array(chosen), np.array(best))


@pytest.mark.parametrize("updated", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 16, 40])
def test_hyper_connections(tokens, updated, normal, rng):
    fn = ops.Blocks(mx.array((rng.normal(size=(24, 4 * 4096)) * 0.01).astype(np.float16).view(np.uint8)), "F16")
    update = (normal(tokens, 4096), normal(tokens, 4), normal(tokens, 4, 4)) if updated else None
    inputs = normal(tokens, 4, 4096), fn, update, normal(3), normal(24), normal(4096), 20, EPS, EPS
    for found, expected in zip(*both(lambda: ops.hyper_input(*inputs)), strict=True):
        near(found, expected, EXACT)


def test_a_launch_that_takes_another_s_place_in_a_graph(normal, rng):
    """MLX keeps a graph for its shape, here of one or two launches, and has it launch other kernels the next time."""
    head = ops.Blocks(mx.array((rng.normal(size=(4, 4 * 4096)) * 0.01).astype(np.float16).view(np.uint8)), "F16")
    streams, numbers = normal(1, 4, 4096), (normal(1), normal(4), normal(4096))
    logits, bias = normal(1, 256), normal(256)
    for _ in range(2):
        near(*both(lambda: ops.hyper_output(streams, head, None, *numbers, EPS, EPS)), EXACT)
        (selected, weight), (expected, expected_weight) = both(
            lambda: ops.route(logits, bias, None, mx.zeros(1, mx.int32), SLOTS, 1.5))
        np.testing.assert_array_equal(np.array(selected), np.array(expected))
        near(weight, expected_weight, EXACT)


@pytest.mark.parametrize("tokens", [1, 40])
def test_routes(tokens, normal, rng):
    logits, bias = normal(tokens, 256), normal(256) * 0.1
    with ops.only("cuda"):
        selected, weight = ops.route(logits, bias, None, mx.zeros(tokens, mx.int32), SLOTS, 1.5)
    p = np.sqrt(np.logaddexp(np.array(logits, np.float64), 0))
    best = np.sort(np.argsort(-(p + np.array(bias)), axis=1)[:, :SLOTS], axis=1)
    np.testing.assert_array_equal(np.array(selected), best)
    chosen = np.take_along_axis(p, best, axis=1)
    near(weight, 1.5 * chosen / chosen.sum(1, keepdims=True), EXACT)


@pytest.mark.parametrize("tokens", [1, 16])
def test_rows_of_tokens_and_of_groups(tokens, normal, tables, rng):
    turn, positions = tables(tokens), mx.array(rng.integers(8, 9000, tokens), mx.int32)
    inputs = normal(tokens, 1024), normal(tokens, 512), normal(1024), normal(512), *turn, \
        ops.fp8_pack(normal(tokens, 128, 512), 64), positions, True, EPS
    (qr, rings), (expected_qr, expected_rings) = both(lambda: ops.latent_step(*inputs))
    near(qr, expected_qr, EXACT)
    assert np.mean(np.array(rings) != np.array(expected_rings)) < 1e-3    # a code may fall to the other side
    for width, overlap, ratio, packing in ((512, 2, 4, "fp8"), (128, 2, 4, "fp4"), (512, 1, 128, "fp8")):
        columns = overlap * width
        inputs = normal(tokens, columns), normal(tokens, columns), normal(tokens, overlap * ratio, 2, columns), \
            normal(ratio, columns), normal(width), *turn, positions // ratio * ratio + ratio - 1, ratio, packing, EPS
        (after, rows), (expected_after, expected_rows) = both(lambda: ops.compress_token(*inputs))
        near(after, expected_after, EXACT)
        assert np.mean(np.array(rows) != np.array(expected_rows)) < 5e-3


@pytest.mark.parametrize("kinds", [((4, 2, 512, "fp8"), (4, 2, 128, "fp4")), ((128, 1, 512, "fp8"),)], ids=str)
def test_what_a_step_keeps_in_one_launch(kinds, normal, tables, rng):
    turn, positions = tables(3), mx.array([4100, 4103, 255], mx.int32)
    groups = [ops.Group(normal(3, overlap * width), normal(3, overlap * width),
                        normal(3, overlap * ratio, 2, overlap * width), normal(ratio, overlap * width), normal(width),
                        *turn, packing) for ratio, overlap, width, packing in kinds]
    inputs = normal(3, 1024), normal(3, 512), normal(1024), normal(512), *turn, \
        ops.fp8_pack(normal(3, 128, 512), 64), positions, True, EPS, groups
    (qr, rings, kept), (expected_qr, expected_rings, expected) = both(lambda: ops.keep_step(*inputs))
    near(qr, expected_qr, EXACT)
    assert np.mean(np.array(rings) != np.array(expected_rings)) < 1e-3    # a code may fall to the other side
    for (after, rows), (expected_after, expected_rows) in zip(kept, expected, strict=True):
        near(after, expected_after, EXACT)
        assert np.mean(np.array(rows) != np.array(expected_rows)) < 5e-3
