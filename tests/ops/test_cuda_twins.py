"""The CUDA kernels that MLX launches: what is launched fits what was compiled, and compiles, without a card."""
import re
import shutil
import subprocess

import mlx.core as mx
import pytest

from ds4mlx import ops
from ds4mlx.gguf.blocks import row_bytes
from ds4mlx.ops import card, cuda_kernel

T1, T40, S = 1, 40, 6


def zeros(*shape, dtype=mx.float32):
    return mx.zeros(shape, dtype)


def blocks(kind, *shape):
    return ops.arrange(ops.Blocks(zeros(*shape[:-1], row_bytes(kind, shape[-1]), dtype=mx.uint8), kind))


def tables(tokens):
    return zeros(tokens, 32), zeros(tokens, 32)


def dense(tokens):
    ops.dense_matmuls(zeros(tokens, 4096), [blocks("Q8_0", 512, 4096), blocks("F16", 256, 4096)])
    ops.dense_matmul(zeros(tokens, 8 * 512), blocks("Q8_0", 256, 512), groups=8)


def experts(kind, tokens):
    outer, inner = blocks(kind, 2, 256, 4096), blocks(kind, 2, 256, 2048)
    shared, selected = blocks("Q8_0", 256, 4096), zeros(tokens, S, dtype=mx.int32)
    ops.expert_gate_up(zeros(tokens, 4096), selected, zeros(tokens, S), outer, outer, 10.0, (shared, shared))
    ops.expert_down(zeros(tokens, S + 1, 2048), selected, inner, blocks("Q8_0", 256, 2048))


def attention(tokens, chosen):
    picks = zeros(tokens, 512, dtype=mx.int32) if chosen else None
    rows = zeros(1300, 584, dtype=mx.uint8)
    ops.attention(zeros(tokens, 64 * 512), *tables(tokens), zeros(127 + tokens, 584, dtype=mx.uint8), 5000, rows, picks,
                  4, zeros(64), 128, 1e-6)


def attention_step(sequences, chosen):
    picks = zeros(sequences, 512, dtype=mx.int32) if chosen else None
    pool = ops.Paged(zeros(2048, 584, dtype=mx.uint8), zeros(sequences, 3, dtype=mx.int32), 512)
    ops.attention_step(zeros(sequences, 64 * 512), *tables(sequences), zeros(sequences, 128, 584, dtype=mx.uint8),
                       zeros(sequences, dtype=mx.int32) + 5000, pool, 1250, picks, 4, zeros(64), 1e-6)


def indexer(tokens):
    q, weight = ops.index_queries(zeros(tokens, 64, 128), *tables(tokens), True), zeros(tokens, 64)
    positions, pages = mx.arange(5000, 5000 + tokens, dtype=mx.int32), zeros(tokens, 3, dtype=mx.int32)
    ops.index_scores_step(q, weight, ops.Paged(zeros(2048, 68, dtype=mx.uint8), pages, 512), 1250, 1.0, positions)
    ops.select_rows(ops.index_scores(q, weight, zeros(1300, 68, dtype=mx.uint8), 1.0, positions), positions, 4, 512)


def hyper(tokens):
    streams, numbers = zeros(tokens, 4, 4096), (zeros(3), zeros(24), zeros(4096))
    update = zeros(tokens, 4096), zeros(tokens, 4), zeros(tokens, 4, 4)
    fn, last = (ops.Blocks(zeros(rows, 2 * 4 * 4096, dtype=mx.uint8), "F16") for rows in (24, 4))
    for some in (None, update):
        ops.hyper_input(streams, fn, some, *numbers, 20, 1e-6, 1e-6)
    ops.hyper_output(streams, last, update, zeros(1), zeros(4), zeros(4096), 1e-6, 1e-6)


def between_products(tokens):
    q, kv, norms = zeros(tokens, 1024), zeros(tokens, 512), (zeros(1024), zeros(512))
    positions = mx.arange(tokens, dtype=mx.int32)
    ops.latent(q, kv, *norms, *tables(tokens), zeros(127, 584, dtype=mx.uint8), True, 1e-6)
    ops.latent_step(q, kv, *norms, *tables(tokens), zeros(tokens, 128, 584, dtype=mx.uint8), positions, True, 1e-6)
    ops.route(zeros(tokens, 256), zeros(256), None, positions, S, 1.5)
    ops.route(zeros(tokens, 256), None, zeros(512, S, dtype=mx.int32), positions, S, 1.5)


def kept(sequences):
    at, held = zeros(sequences, dtype=mx.int32), []
    for width, packing in ((512, "fp8"), (128, "fp4")):
        k, frontiers, ape = zeros(sequences, 2 * width), zeros(sequences, 8, 2, 2 * width), zeros(4, 2 * width)
        held.append(ops.Group(k, k, frontiers, ape, zeros(width), *tables(sequences), packing))
    ops.keep_step(zeros(sequences, 1024), zeros(sequences, 512), zeros(1024), zeros(512), *tables(sequences),
                  zeros(sequences, 128, 584, dtype=mx.uint8), at, True, 1e-6, held)


def compressor(ratio, width, packing, overlap):
    columns, held = width * overlap, ratio * overlap
    ops.compress_token(zeros(2, columns), zeros(2, columns), zeros(2, held, 2, columns), zeros(ratio, columns),
                       zeros(width), *tables(2), mx.arange(2, dtype=mx.int32), ratio, packing, 1e-6)
    ops.compress_step(zeros(140, columns), zeros(140, columns), zeros(0, 2, columns), zeros(ratio, columns),
                      zeros(width), *tables(140 // ratio), 0, ratio, packing, 1e-6)


CASES = {"dense, a token": lambda: dense(T1), "dense, 16": lambda: dense(16), "dense, 40": lambda: dense(T40),
         **{f"experts, {kind}, {tokens}": lambda kind=kind, tokens=tokens: experts(kind, tokens)
            for kind in ("IQ2_XXS", "Q2_K", "Q4_K", "MXFP4") for tokens in (T1, T40)},
         **{f"attention, chosen {chosen}": lambda chosen=chosen: attention(T40, chosen) for chosen in (False, True)},
         **{f"a step's attention, chosen {chosen}": lambda chosen=chosen: attention_step(2, chosen)
            for chosen in (False, True)},
         **{f"hyper-connections, {tokens}": lambda tokens=tokens: hyper(tokens) for tokens in (T1, 16, T40)},
         "between products": lambda: between_products(T1), "what a step keeps": lambda: kept(2),
         "compressor, 4": lambda: compressor(4, 512, "fp8", 2),
         "compressor, index": lambda: compressor(4, 128, "fp4", 2),
         "compressor, 128": lambda: compressor(128, 512, "fp8", 1),
         "indexer, a token": lambda: indexer(T1), "indexer, 40": lambda: indexer(T40)}
QUICK = "dense, a token", "experts, IQ2_XXS, 1", "compressor, 4"


def launches(case):
    """Of a case: kernel, inputs, outputs, blocks and threads."""
    seen = []
    with ops.only("cuda"), cuda_kernel.observe(lambda *launch: seen.append(launch)):
        CASES[case]()
    return seen


@pytest.mark.parametrize("case", CASES)
def test_what_is_launched_has_room_and_names_its_buffers(case):
    limits = card.limits()
    for kernel, inputs, _, groups, threads in launches(case):
        assert kernel.shared_bytes <= limits.of_block_bytes and threads[0] <= 1024 and min(groups) > 0
        words = set(re.findall(r"\w+", kernel.body))
        assert set(kernel.outputs) <= words and len(inputs) == len(kernel.inputs)
        assert all(input_.ndim > 0 for input_ in inputs)   # a number would be an array, read over the bus


@pytest.mark.parametrize("case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow)
                                  for case in CASES])
def test_what_is_launched_compiles(case, tmp_path):
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc here")
    texts = {kernel.name: kernel.text(inputs, outputs) for kernel, inputs, outputs, *_ in launches(case)}
    for name, text in texts.items():
        file = tmp_path / f"{name}.cu"
        file.write_text(text, "utf-8")
        result = subprocess.run(["nvcc", "-std=c++17", "-arch=sm_90", "-cubin", "-o", "/dev/null", file],
                                capture_output=True, text=True)
        assert result.returncode == 0, result.stderr[:2000]


@pytest.mark.parametrize("case", CASES)
def test_nothing_runs_in_clusters_which_a_graph_of_mlx_would_hand_on_to_other_kernels(case):
    for kernel, inputs, outputs, *_ in launches(case):
        assert not re.search(r"cluster_dims\(\d", kernel.text(inputs, outputs))


def test_sizes_of_inputs_follow_the_outputs_as_numbers():
    kernel = cuda_kernel.kernel("route", "f(x, y, x_shape[1], w_shape[0]);", ("x", "w"), ("y",))
    text = kernel.text([zeros(2, 3), zeros(4, dtype=mx.uint8)], [((1,), mx.int32)])
    assert text.endswith("(const float* x, const unsigned char* w, int* y, int x_shape_1, int w_shape_0) {\n"
                         "f(x, y, x_shape_1, w_shape_0);\n}\n")


def test_another_text_or_more_shared_memory_has_another_name():
    names = {cuda_kernel.kernel("route", "::scored();", ("x",), ("y",), (("E", experts),), shared_bytes=bytes_).name
             for experts in (8, 16) for bytes_ in (0, 60_000)}
    assert len(names) == 4
