"""The whole model once more, in NumPy and float64 by default: one sequence, one shot, no cache, nothing clever.

Written from the formulas alone and sharing no code with the package or with transformers, so that the stored
expectations have a second witness. Arrays: T tokens, D hidden, H heads, d head width, E experts.
"""
import math
from collections.abc import Iterator

import numpy as np

from oracle.weights import (CHOSEN, CONFIG, EXPERTS, GROUPS, HASH_LAYERS, HEAD, HEADS, INDEX_HEAD, INDEX_HEADS,
                            OUT_RANK, RATIOS, STREAMS)

Array = np.ndarray
Weights = dict[str, Array]
EPS = 1e-6
WINDOW, TOP_ROWS, CLAMP = int(CONFIG["sliding_window"]), int(CONFIG["index_topk"]), float(CONFIG["swiglu_limit"])
ROUTED_SCALE, ROTARY, PASSES = 1.5, 64, 20
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def forward(weights: Weights, ids: list[int], rounded: bool = False,
            dtype: type[np.floating] = np.float64) -> Iterator[Array]:
    """Yields the four residual streams [T, 4, D] after each layer, then the logits [T, V].

    rounded: apply the FP8 and Hadamard + FP4 rounding of attention memory.
    """
    w = {name: array.astype(dtype) if array.dtype == np.float32 else array for name, array in weights.items()}
    tokens = np.array(ids)
    streams = np.repeat(w["embed.weight"][tokens][:, None], STREAMS, axis=1)
    for layer, ratio in enumerate(RATIOS):
        part = {name.removeprefix(f"layers.{layer}."): array for name, array in w.items()
                if name.startswith(f"layers.{layer}.")}
        x, post, mix = hyper_pre(streams, part["hc_attn_fn"], part["hc_attn_scale"], part["hc_attn_base"])
        y = attention(rms(x) * part["attn_norm.weight"], part, ratio, rounded)
        streams = hyper_post(y, streams, post, mix)
        x, post, mix = hyper_pre(streams, part["hc_ffn_fn"], part["hc_ffn_scale"], part["hc_ffn_base"])
        y = mixture(rms(x) * part["ffn_norm.weight"], tokens, part, layer)
        streams = hyper_post(y, streams, post, mix)
        yield streams
    mix = rms(streams.reshape(len(ids), -1)) @ w["hc_head_fn"].T
    pre = sigmoid(mix * w["hc_head_scale"][0] + w["hc_head_base"]) + EPS
    yield (rms(np.einsum("tn,tnd->td", pre, streams)) * w["norm.weight"]) @ w["head.weight"].T


def rms(x: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array, axis: int) -> Array:
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def hyper_pre(streams: Array, fn: Array, scale: Array, base: Array) -> tuple[Array, Array, Array]:
    """One input [T, D] out of four streams [T, 4, D], with post [T, 4] and the mixing matrix [T, from, to]."""
    mix = rms(streams.reshape(len(streams), -1)) @ fn.T
    pre = sigmoid(mix[:, :4] * scale[0] + base[:4]) + EPS
    post = 2 * sigmoid(mix[:, 4:8] * scale[1] + base[4:8])
    m = softmax((mix[:, 8:] * scale[2] + base[8:]).reshape(-1, 4, 4), axis=2) + EPS
    for turn in range(PASSES):
        if turn:
            m = m / (m.sum(axis=2, keepdims=True) + EPS)
        m = m / (m.sum(axis=1, keepdims=True) + EPS)
    return np.einsum("tn,tnd->td", pre, streams), post, m


def hyper_post(y: Array, streams: Array, post: Array, mix: Array) -> Array:
    return post[:, :, None] * y[:, None] + np.einsum("tij,tid->tjd", mix, streams)


def frequencies(compressed: bool) -> Array:
    """32 rotation frequencies: theta 10000, or theta 160000 with YaRN's ramp between pairs 15 and 25."""
    pair = np.arange(ROTARY // 2)
    if not compressed:
        return 10000.0 ** (-2 * pair / ROTARY)
    plain = 160000.0 ** (-2 * pair / ROTARY)
    turn = [ROTARY * math.log(65536 / (2 * math.pi * beta)) / (2 * math.log(160000)) for beta in (32, 1)]
    low, high = max(math.floor(turn[0]), 0), min(math.ceil(turn[1]), ROTARY - 1)
    ramp = np.clip((pair - low) / (high - low), 0, 1)
    return plain / 16 * ramp + plain * (1 - ramp)


def rope(x: Array, positions: Array, compressed: bool, inverse: bool = False) -> Array:
    """Rotates interleaved pairs of the last 64 channels of x [T, ..., d]."""
    angle = positions[:, None] * frequencies(compressed)
    angle = (-angle if inverse else angle).reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos, sin = np.cos(angle).astype(x.dtype), np.sin(angle).astype(x.dtype)
    out = x.copy()
    even, odd = x[..., -ROTARY::2], x[..., 1 - ROTARY::2]
    out[..., -ROTARY::2], out[..., 1 - ROTARY::2] = even * cos - odd * sin, even * sin + odd * cos
    return out


def scale_above(block: Array, floor: float, largest: float) -> Array:
    """The smallest power of two that brings a block into [-largest, largest]."""
    top = np.maximum(np.abs(block).max(axis=-1, keepdims=True), floor).astype(np.float32)
    mantissa, exponent = np.frexp(top / np.float32(largest))
    return np.ldexp(1.0, exponent - (mantissa == 0.5)).astype(block.dtype)


def fp8_round(row: Array) -> Array:
    """E4M3 and back in blocks of 64 over all channels but the rotary ones."""
    block = row[..., :-ROTARY].reshape(*row.shape[:-1], -1, 64)
    scale = scale_above(block, 1e-4, 448)
    value = np.clip(block / scale, -448, 448)
    _, exponent = np.frexp(value)
    step = np.ldexp(1.0, np.maximum(exponent - 4, -9)).astype(row.dtype)  # 4 significant bits, subnormals below 2^-6
    head = (np.rint(value / step) * step * scale).reshape(*row.shape[:-1], -1)
    return np.concatenate([head, row[..., -ROTARY:]], axis=-1)


def hadamard_fp4(row: Array) -> Array:
    """Walsh-Hadamard over the row, then E2M1 and back in blocks of 32."""
    matrix = np.ones((1, 1), row.dtype)
    while len(matrix) < row.shape[-1]:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    turned = row @ matrix * np.asarray(row.shape[-1] ** -0.5, row.dtype)
    block = turned.reshape(*row.shape[:-1], -1, 32)
    scale = scale_above(block, 6 * 2.0 ** -126, 6)
    value = np.clip(block / scale, -6, 6)
    away = np.abs(np.abs(value)[..., None] - E2M1)
    # Two codes are equally near only in a tie; looking at even codes first lets the even one win.
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])
    code = order[np.argmin(away[..., order], axis=-1)]
    return (np.sign(value) * E2M1[code].astype(row.dtype) * scale).reshape(row.shape)


def compress(x: Array, part: Weights, place: str, ratio: int, width: int) -> Array:
    """Compressed rows [T // ratio, width] before rounding: a softmax pool per channel, norm, rotation."""
    groups = len(x) // ratio
    if not groups:
        return np.zeros((0, width), x.dtype)
    x = x[:groups * ratio]
    k = (x @ part[f"{place}.wkv.weight"].T).reshape(groups, ratio, -1)
    s = (x @ part[f"{place}.wgate.weight"].T).reshape(groups, ratio, -1) + part[f"{place}.ape"]
    if ratio == 4:  # the first half of each vector serves the next group
        before = np.zeros((1, ratio, width), x.dtype)
        k = np.concatenate([np.concatenate([before, k[:-1, :, :width]]), k[:, :, width:]], axis=1)
        s = np.concatenate([np.concatenate([before - np.inf, s[:-1, :, :width]]), s[:, :, width:]], axis=1)
    pooled = (softmax(s, axis=1) * k).sum(axis=1)
    return rope(rms(pooled) * part[f"{place}.norm.weight"], np.arange(groups) * ratio, compressed=True)


def selected(x: Array, latent: Array, part: Weights, rounded: bool) -> Array:
    """Which compressed rows each query may use on a ratio-4 layer, bool [T, rows]; ties go to the lower row."""
    place, positions = "attn.indexer", np.arange(len(x))
    rows = compress(x, part, f"{place}.compressor", 4, INDEX_HEAD)
    query = rope((latent @ part[f"{place}.wq_b.weight"].T).reshape(len(x), INDEX_HEADS, -1), positions, compressed=True)
    if rounded:
        rows, query = hadamard_fp4(rows), hadamard_fp4(query)
    importance = x @ part[f"{place}.weights_proj.weight"].T * (INDEX_HEAD * INDEX_HEADS) ** -0.5
    score = np.einsum("th,thc->tc", importance, np.maximum(query @ rows.T, 0))
    allowed = np.arange(len(rows)) < (positions[:, None] + 1) // 4
    best = np.argsort(-np.where(allowed, score, -np.inf), axis=-1, kind="stable")[:, :TOP_ROWS]
    chosen = np.zeros_like(allowed)
    np.put_along_axis(chosen, best, True, axis=-1)
    return chosen & allowed


def attention(x: Array, part: Weights, ratio: int, rounded: bool) -> Array:
    """Window and compressed rows serve as keys and values of all heads. x [T, D] to [T, D]."""
    positions = np.arange(len(x))
    latent = rms(x @ part["attn.wq_a.weight"].T) * part["attn.q_norm.weight"]
    q = rope(rms((latent @ part["attn.wq_b.weight"].T).reshape(len(x), HEADS, HEAD)), positions, ratio > 0)
    rows = rope(rms(x @ part["attn.wkv.weight"].T) * part["attn.kv_norm.weight"], positions, ratio > 0)
    age = positions[:, None] - positions
    visible = (age >= 0) & (age < WINDOW)
    if ratio:
        extra = compress(x, part, "attn.compressor", ratio, HEAD)
        seen = np.arange(len(extra)) < (positions[:, None] + 1) // ratio
        rows = np.concatenate([rows, extra])
        visible = np.concatenate([visible, selected(x, latent, part, rounded) if ratio == 4 else seen], axis=1)
    if rounded:
        rows = fp8_round(rows)
    logit = np.where(visible[:, None], q @ rows.T * HEAD ** -0.5, -np.inf)  # [T, H, rows]
    sink = np.broadcast_to(part["attn.attn_sink"][:, None], (len(x), HEADS, 1))
    share = softmax(np.concatenate([logit, sink], axis=-1), axis=-1)[..., :-1]
    out = rope(share @ rows, positions, ratio > 0, inverse=True).reshape(len(x), GROUPS, -1)
    low = np.einsum("tgi,gri->tgr", out, part["attn.wo_a.weight"].reshape(GROUPS, OUT_RANK, -1))
    return low.reshape(len(x), -1) @ part["attn.wo_b.weight"].T


def mixture(x: Array, tokens: Array, part: Weights, layer: int) -> Array:
    """Chosen experts, weighted, plus the shared one. x [T, D] to [T, D]."""
    prob = np.sqrt(np.logaddexp(0, x @ part["ffn.gate.weight"].T))
    if layer < HASH_LAYERS:
        chosen = part["ffn.gate.tid2eid"][tokens]
    else:
        chosen = np.argsort(-(prob + part["ffn.gate.bias"]), axis=-1, kind="stable")[:, :CHOSEN]
    share = np.take_along_axis(prob, chosen, axis=-1)
    share = share / share.sum(axis=-1, keepdims=True) * ROUTED_SCALE
    y = expert(x, part, "ffn.shared_experts", np.ones((len(x), 1), x.dtype))
    for e in range(EXPERTS):
        token, slot = np.nonzero(chosen == e)
        y[token] += expert(x[token], part, f"ffn.experts.{e}", share[token, slot][:, None])
    return y


def expert(x: Array, part: Weights, place: str, share: Array) -> Array:
    gate = np.minimum(x @ part[f"{place}.w1.weight"].T, CLAMP)
    up = np.clip(x @ part[f"{place}.w3.weight"].T, -CLAMP, CLAMP)
    return (share * gate * sigmoid(gate) * up) @ part[f"{place}.w2.weight"].T
