"""Operations on the card at the sizes of Flash, against NumPy in float64."""
import sys

import cupy as cp
import numpy as np
import pytest
from oracle.numpy_forward import (fp8_round, frequencies, hadamard_fp4, hyper_post, hyper_pre, rms, rope, sigmoid,
                                  softmax)

from ds4mlx.cuda_port import launch, ops, scratch
from ds4mlx.cuda_port.device import LEAST_BLOCK_BYTES, use_stream
from ds4mlx.cuda_port.forms import BLOCK_OWN_BYTES, Limits
from ds4mlx.cuda_port.sizes import Sizes, overlap, page_rows
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.models.deepseek_v4.config import FLASH, PRO

SIZES = Sizes.of(FLASH, packed=True)
E4M3 = np.array([(-1) ** (c >> 7) * ((8 + c % 8) * 2.0 ** ((c >> 3 & 15) - 10) if c >> 3 & 15 else c % 8 * 2.0 ** -9)
                 for c in range(256)])
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@pytest.fixture(autouse=True)
def on_stream():
    stream = use_stream()
    yield
    stream.synchronize()


def near(found, wanted, bound):
    """Root mean square of the difference over that of `wanted`."""
    found = cp.asnumpy(found).astype(np.float64)
    error = np.sqrt(np.mean((found - wanted) ** 2) / np.mean(wanted ** 2))
    assert np.isfinite(found).all() and error < bound, error


def f32(a):
    return cp.asarray(np.asarray(a, np.float32))


def i32(a):
    return cp.asarray(np.asarray(a, np.int32))


def unpacked(rows):
    """Rows u8 [.., 584] to [.., 512]."""
    rows = cp.asnumpy(rows)
    scale = 2.0 ** (rows[..., 448:455].astype(np.int64) - 127)
    return np.concatenate([E4M3[rows[..., :448]] * np.repeat(scale, 64, -1),
                           np.ascontiguousarray(rows[..., 456:]).view(np.float16)], -1)


def index_unpacked(rows):
    rows = cp.asnumpy(rows)
    codes = np.stack([rows[..., :64] & 15, rows[..., :64] >> 4], -1).reshape(*rows.shape[:-1], 128)
    return E2M1[codes] * np.repeat(2.0 ** (rows[..., 64:].astype(np.int64) - 127), 32, -1)


def tables(positions):
    out, f = cp.empty((4, 2, len(positions), 32), cp.float32), np.stack([frequencies(False), frequencies(True)])
    ops.tables(i32(positions), cp.asarray(f), out)
    return out


def test_cuda_tables_are_exact_at_a_million():
    positions = np.array([0, 5, 131, 1_048_575])
    found = cp.asnumpy(tables(positions))
    for kind, at, compressed in ((0, positions, False), (1, positions, True), (2, positions // 4 * 4, True),
                                 (3, positions // 128 * 128, True)):
        angle = at[:, None] * frequencies(compressed)
        np.testing.assert_allclose(found[kind], [np.cos(angle), np.sin(angle)], atol=1e-7)


@pytest.mark.parametrize("tokens, step", [(1, True), (5, True), (16, True), (1, False), (45, False)])
@pytest.mark.parametrize("kind, D", [("F16", FLASH.hidden_size), ("F32", FLASH.hidden_size), ("F16", PRO.hidden_size)])
def test_cuda_hyper_connection(tokens, step, kind, D, rng):
    real = {"F16": np.float16, "F32": np.float32}[kind]
    streams, y = rng.standard_normal((tokens, 4, D)), rng.standard_normal((tokens, D))
    fn = (rng.standard_normal((24, 4 * D)) * 0.01).astype(real)
    scale, base, norm = rng.standard_normal(3), rng.standard_normal(24), 1 + 0.1 * rng.standard_normal(D)
    post, m = rng.random((tokens, 4)), rng.random((tokens, 4, 4))
    of = ops.Connection(Weight(kind, cp.asarray(fn).view(cp.uint8), fn.shape), f32(scale), f32(base), f32(norm), 20,
                        1e-6, 1e-6)
    held, x = f32(streams), cp.empty((tokens, D), cp.float32)
    update = ops.Update(f32(y), f32(post), f32(m), cp.empty((tokens, 40), cp.float32))
    for first in (False, True):
        ops.hyper_mix(held, of, update, first, x, step)
        if step:    # the rest is a router's or a latent's
            e = cp.empty((tokens, 1), cp.int32), cp.empty((tokens, 1), cp.float32)
            ops.route(f32(np.zeros((tokens, 8))), f32(np.zeros(8)), None, i32([0] * tokens), 1.0, *e,
                      ops.WayBack(of, update))
        streams = streams if first else hyper_post(y, streams, post, m)
        wanted, wanted_post, wanted_m = hyper_pre(streams, fn.astype(np.float64), scale, base)
        near(held, streams, 1e-6)
        near(x, rms(wanted) * norm, 1e-5)
        near(update.post, wanted_post, 1e-5)
        near(update.m, wanted_m, 1e-5)


@pytest.mark.parametrize("step", [True, False])
def test_cuda_head_connection(step, rng):
    D, tokens = 4096, 3
    streams, y, post = rng.standard_normal((tokens, 4, D)), rng.standard_normal((tokens, D)), rng.random((tokens, 4))
    m, fn = rng.random((tokens, 4, 4)), rng.standard_normal((4, 4 * D)) * 0.01
    of = ops.Connection(Weight("F32", f32(fn).view(cp.uint8), fn.shape), f32([0.7]), f32([0.1, -0.2, 0.3, 0]),
                        f32(np.ones(D)), 0, 1e-6, 1e-6)
    x = cp.empty((tokens, D), cp.float32)
    update = ops.Update(f32(y), f32(post), f32(m), cp.empty((tokens, 20), cp.float32))
    ops.hyper_mix(f32(streams), of, update, False, x, step)
    streams = hyper_post(y, streams, post, m)
    pre = sigmoid(rms(streams.reshape(tokens, -1)) @ fn.T * 0.7 + [0.1, -0.2, 0.3, 0]) + 1e-6
    near(x, rms(np.einsum("tn,tnd->td", pre, streams)), 1e-5)


class History:
    """Random products of one session's tokens, and what a layer makes of them in float64."""

    def __init__(self, rng, tokens, ratio):
        width = {4: (1024, 256), 128: (512,), 0: ()}[ratio]
        self.ratio, self.tokens = ratio, tokens
        self.q, self.kv = rng.standard_normal((tokens, 1024)), rng.standard_normal((tokens, 512))
        self.norms = [1 + 0.1 * rng.standard_normal(n) for n in (1024, 512)]
        self.products = [[2 * rng.standard_normal((tokens, w)) for _ in "ks"] for w in width]
        self.apes = [rng.standard_normal((ratio, w)) for w in width]
        self.row_norms = [1 + 0.1 * rng.standard_normal(w) for w in (512, 128)[:len(width)]]

    def rows(self):
        at = np.arange(self.tokens)
        return fp8_round(rope(rms(self.kv) * self.norms[1], at, self.ratio > 0))

    def compressed(self, i):
        (k, s), r, w = self.products[i], self.ratio, (512, 128)[i]
        n = self.tokens // r
        k, s = k[:n * r].reshape(n, r, -1), s[:n * r].reshape(n, r, -1) + self.apes[i]
        if r == 4:
            none = np.zeros((1, r, w))
            k = np.concatenate([np.concatenate([none, k[:-1, :, :w]]), k[:, :, w:]], 1)
            s = np.concatenate([np.concatenate([none - np.inf, s[:-1, :, :w]]), s[:, :, w:]], 1)
        row = rope(rms((softmax(s, 1) * k).sum(1)) * self.row_norms[i], np.arange(n) * r, True)
        return hadamard_fp4(row) if i else fp8_round(row)


class Card:
    """The same on the card: `slots` sessions, of which the given one takes in the history."""

    def __init__(self, history, slot=1, slots=3):
        h, r = history, history.ratio
        self.history, self.slot, held = h, slot, overlap(r) * r if r else 0
        self.norms = ops.Norms(*map(f32, h.norms))
        self.window = cp.zeros((slots, SIZES.ring * 584), cp.uint8)
        self.pages = i32([2, 1, 4, 3])
        self.compressors = [ops.Compressor(f32(h.apes[i]), f32(h.row_norms[i]),
                                           cp.zeros((slots, 8 * held * h.products[i][0].shape[1]), cp.uint8),
                                           cp.zeros((5, page_rows(r) * (584, 68)[i]), cp.uint8), index=i == 1)
                            for i in range(len(h.products))]

    def chunk(self, start, end):
        """Returns qr and the chunk's rows; what comes after the attention of the chunk is done too."""
        h, r, T, part = self.history, self.history.ratio, end - start, slice(start, end)
        qr, rows = cp.empty((T, 1024), cp.float32), cp.empty((T, 584), cp.uint8)
        ops.latent(f32(h.q[part]), f32(h.kv[part]), self.norms, tables(np.arange(start, end))[1 if r else 0], qr, rows,
                   SIZES, 1e-6)
        for (k, s), of in zip(h.products, self.compressors):
            table = cp.empty((2, end // r - start // r, 32), cp.float32)
            ops.group_tables(start // r, r, cp.asarray(np.stack([frequencies(False), frequencies(True)])), table)
            ops.compress(f32(k[part]), f32(s[part]), of, of.state[self.slot], table, self.pages, start, r, SIZES, 1e-6)
        ops.keep_rows(rows, self.window[self.slot], start, SIZES)
        return qr, rows

    def step(self, position, others=()):
        h, r, at = self.history, self.history.ratio, [position]
        qr, pages = cp.empty((1, 1024), cp.float32), self.pages[None]
        stride = self.window.shape[1]
        # The slots of this test's arrays differ in size, where a session has one slot for all: it is the only one here.
        parts = [ops.Compressor(c.ape, c.norm, c.state[self.slot:], c.rows, c.index) for c in self.compressors]
        ops.latent_step(f32(h.q[at]), f32(h.kv[at]), self.norms, tables(at), qr, self.window[self.slot:], stride,
                        i32([0]), i32(at), pages, [(f32(k[at]), f32(s[at])) for k, s in h.products], parts, r, SIZES,
                        1e-6)
        return qr

    def pool(self, i, count):
        rows, size = cp.asnumpy(self.compressors[i].rows), (584, 68)[i]
        return np.concatenate([rows[p].reshape(-1, size) for p in cp.asnumpy(self.pages)])[:count]


def mostly_equal(found, wanted):
    """Rounding is discontinuous: of values that lie on an edge, a few may fall to the other side."""
    same = np.isclose(found, wanted, rtol=2e-3, atol=1e-6)
    assert same.mean() > 0.999 and np.allclose(found, wanted, rtol=0.6, atol=0.3), same.mean()


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("cuts", [[300], [1, 2, 7, 130, 131, 260, 300], [0]], ids=str)
def test_cuda_rows_of_chunks_and_steps(ratio, cuts, rng):
    h = History(rng, 300, ratio)
    card = Card(h)
    if cuts == [0]:
        qr = cp.concatenate([card.step(p) for p in range(300)])
    else:
        qr = cp.concatenate([card.chunk(a, b)[0] for a, b in zip([0, *cuts], cuts)])
    near(qr, rms(h.q) * h.norms[0], 1e-6)
    ring = unpacked(card.window[card.slot].reshape(SIZES.ring, 584))
    last = np.arange(300 - 128, 300)
    mostly_equal(ring[last % SIZES.ring], h.rows()[last])
    for i in range(len(h.products)):
        found = card.pool(i, 300 // ratio)
        mostly_equal(index_unpacked(found) if i else unpacked(found), h.compressed(i))


def attention(q, rows, seen, sink, position, compressed):
    """One token: q [64, 512], keys [K, 512]."""
    q = rope(rms(q)[None], np.array([position]), compressed)[0]
    z = np.concatenate([q @ rows.T * 512 ** -0.5, sink[:, None]], 1)
    return rope((softmax(z, 1)[:, :-1] @ rows)[None], np.array([position]), compressed, inverse=True)[0].reshape(-1)


@pytest.mark.parametrize("exact, block_bytes", [(True, None), (False, None), (False, 101376),
                                                (False, LEAST_BLOCK_BYTES)])
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_cuda_attention_of_a_chunk_and_of_steps(ratio, exact, block_bytes, rng, monkeypatch):
    if block_bytes:     # of shared memory, as smaller cards have; the smallest have no clusters
        small = Limits(launch.processors(), block_bytes + BLOCK_OWN_BYTES, block_bytes)
        attending = sys.modules[ops.attend.__module__]
        monkeypatch.setattr(attending, "limits", lambda: small)
        if block_bytes == LEAST_BLOCK_BYTES:
            monkeypatch.setattr(attending, "clusters", lambda: False)
    n, start = 400, 300
    h, sink = History(rng, n, ratio), rng.standard_normal(64)
    q = rng.standard_normal((n, 64 * 512))
    card, at = Card(h), np.arange(start, n)
    card.chunk(0, start)
    before = card.window.copy()
    _, fresh = card.chunk(start, n)
    chosen = None
    if ratio == 4:
        chosen = np.sort(np.stack([rng.permutation((p + 1) // 4)[:32] for p in range(start, n)]), 1)
    rows = unpacked(fresh), unpacked(card.pool(0, n // ratio)) if ratio else None
    window = np.concatenate([unpacked(before[1].reshape(SIZES.ring, 584))[np.arange(start - 128, start) % SIZES.ring],
                             rows[0]])
    wanted = []
    for i, p in enumerate(at):
        keys = [window[i + 1:i + 129]]
        if ratio:
            keys.append(rows[1][chosen[i] if ratio == 4 else np.arange((p + 1) // ratio)])
        wanted.append(attention(q[p].reshape(64, 512), np.concatenate(keys), None, sink, p, ratio > 0))
    pool, table, o = card.compressors[0].rows if ratio else None, tables(at)[1 if ratio else 0], cp.empty(
        (n - start, 64 * 512), cp.float32)
    picks = None if chosen is None else i32(chosen)
    held = ops.Rows(before, before.shape[1], i32([1]), fresh, pool, card.pages if ratio else None, picks,
                    n // ratio if ratio else 0)
    ops.attend(f32(q[at]), table, held, i32(at), f32(sink), ratio, SIZES, 1e-6, exact, o)
    near(o, np.stack(wanted), 1e-5 if exact else 2e-3)
    # The last positions as a step of so many sessions that share their slot: a ring holds those behind each still.
    for B in (8, 5, 3, 1):
        held = ops.Rows(card.window, card.window.shape[1], i32([1] * B), None, pool,
                        cp.tile(card.pages, (B, 1)) if ratio else None, None if picks is None else picks[-B:],
                        n // ratio if ratio else 0)
        o = cp.empty((B, 64 * 512), cp.float32)
        ops.attend(f32(q[at[-B:]]), cp.ascontiguousarray(table[:, -B:]), held, i32(at[-B:]), f32(sink), ratio, SIZES,
                   1e-6, exact, o)
        near(o, np.stack(wanted)[-B:], 1e-5 if exact else 2e-3)


@pytest.mark.parametrize("step", [True, False])
@pytest.mark.parametrize("clustered", [True, False])
def test_cuda_indexer_chooses_the_best_rows(step, clustered, rng, monkeypatch):
    if not clustered:
        monkeypatch.setattr(sys.modules["ds4mlx.cuda_port.ops.indexer_topk"], "clusters", lambda: False)
    n, k = 3000, 512
    h = History(rng, n, 4)
    card = Card(h)
    card.chunk(0, n)
    irows = index_unpacked(card.pool(1, n // 4))
    at = np.array([2050, 2051, 2500, 2998, 2999]) if step else np.arange(2400, 2450)
    q, weight = rng.standard_normal((len(at), 64 * 128)), rng.standard_normal((len(at), 64))
    table, chosen = tables(at)[1], cp.full((len(at), k), -1, cp.int32)
    pages = cp.tile(card.pages, (len(at), 1)) if step else card.pages
    ops.choose_rows(f32(q), f32(weight), table, card.compressors[1].rows, pages, i32(at), n // 4, chosen, SIZES)
    turned = hadamard_fp4(rope(q.reshape(len(at), 64, 128), at, True))
    scores = np.einsum("th,thc->tc", weight, np.maximum(np.einsum("thw,cw->thc", turned, irows), 0)) * 8192 ** -0.5
    for found, score, p in zip(cp.asnumpy(chosen), scores, at):
        seen = (p + 1) // 4
        assert (np.diff(found) > 0).all() and (found >= 0).all()
        best = np.sort(np.argsort(-score[:seen], kind="stable")[:k])
        # A query on an edge of FP4 moves its scores a little: then rows about the last place may differ.
        assert len(np.intersect1d(found, best)) >= (k if seen <= k else k - 4)


def test_cuda_equal_scores_go_to_the_lower_row():
    q, weight = np.zeros((1, 64 * 128)), np.ones((1, 64))
    rows, chosen = cp.zeros((2, 512 * 68), cp.uint8), cp.full((1, 4), -1, cp.int32)
    ops.choose_rows(f32(q), f32(weight), tables([99])[1], rows, i32([1]), i32([99]), 25, chosen, SIZES)
    assert cp.asnumpy(chosen).tolist() == [[0, 1, 2, 3]]


def test_cuda_routes_by_score_and_by_table(rng):
    logits, bias = 3 * rng.standard_normal((9, 256)), rng.standard_normal(256)
    logits[3] = 0.5     # all equal but for the bias
    table, ids = rng.permuted(np.tile(np.arange(256), (20, 1)), axis=1)[:, :6], rng.integers(0, 20, 9)
    selected, weight = cp.empty((9, 6), cp.int32), cp.empty((9, 6), cp.float32)
    p = np.sqrt(np.logaddexp(0, logits.astype(np.float32).astype(np.float64)))
    for of in ((f32(bias), None), (None, i32(table))):
        ops.route(f32(logits), *of, i32(ids), 1.5, selected, weight)
        wanted = table[ids] if of[0] is None else np.sort(np.argsort(-(p + bias), 1, kind="stable")[:, :6], 1)
        assert (cp.asnumpy(selected) == wanted).all()
        share = np.take_along_axis(p, wanted, 1)
        near(weight, share / share.sum(1, keepdims=True) * 1.5, 1e-6)


@pytest.mark.parametrize("tokens", [1, 5, 16])
@pytest.mark.parametrize("by_table", [False, True])
def test_cuda_routes_a_step_with_its_product(tokens, by_table, rng):
    x, gate = rng.standard_normal((tokens, 4096)), (rng.standard_normal((256, 4096)) * 0.05).astype(np.float16)
    bias, table, ids = rng.standard_normal(256), rng.permuted(np.tile(np.arange(256), (20, 1)), axis=1)[:, :6], \
        rng.integers(0, 20, tokens)
    sums = rng.standard_normal((tokens, 40)) + 100 * np.repeat([0, 1], [24, 16])
    of = ops.Connection(None, f32(np.ones(3)), f32(np.zeros(24)), None, 20, 1e-6, 1e-6)
    both = [ops.Update(cp.empty((tokens, 4096), cp.float32), cp.zeros((tokens, 4), cp.float32),
                       cp.zeros((tokens, 16), cp.float32), f32(sums)) for _ in range(2)]
    found = [(cp.empty((tokens, 6), cp.int32), cp.empty((tokens, 6), cp.float32)) for _ in range(2)]
    how = (None, i32(table)) if by_table else (f32(bias), None)
    ops.route_step(f32(x), Weight("F16", cp.asarray(gate).view(cp.uint8), gate.shape), *how, i32(ids), 1.5, *found[0],
                   ops.WayBack(of, both[0]), False)
    logits = x.astype(np.float32).astype(np.float64) @ gate.T.astype(np.float64)
    ops.route(f32(logits), *how, i32(ids), 1.5, *found[1], ops.WayBack(of, both[1]))
    assert (found[0][0] == found[1][0]).all()
    near(found[0][1], cp.asnumpy(found[1][1]), 1e-5)
    near(both[0].post, cp.asnumpy(both[1].post), 1e-6)
    near(both[0].m, cp.asnumpy(both[1].m), 1e-6)


def sampled(logits, uniform, temperature, min_p, top_p, top_k):
    """As ds4mlx.ops.sample describes it, in float64."""
    if temperature <= 0:
        return int(np.argmax(logits))
    order = np.argsort(-logits, kind="stable")[:top_k or None]
    p = np.exp((logits[order] - logits[order[0]]) / temperature)
    total = np.cumsum(p)
    kept = total[p >= min_p][-1]
    if top_p < 1:
        kept = min(kept, total[np.searchsorted(total, total[-1] * top_p)])
    return int(order[np.searchsorted(total, kept * uniform, side="right")])


def test_cuda_samples_as_defined(rng):
    V, B = 129280, 16
    logits = (3 * rng.standard_normal((B, V))).astype(np.float32)
    logits[2, [7, 900]] = 30            # a tie: the lower id
    logits[3] = np.round(logits[3])     # ties everywhere
    settings = np.stack([rng.random(B), np.where(np.arange(B) % 4 == 2, 0, 0.3 + rng.random(B)),
                         np.where(np.arange(B) % 3, 0, 0.02), np.where(np.arange(B) % 2, 0.9, 1)], 1).astype(np.float32)
    top_k = np.where(np.arange(B) % 5 == 1, 50, 0)
    token, report = cp.empty(B, cp.int32), cp.empty((B, 2), cp.float32)
    ops.sample(f32(logits), f32(logits), f32(settings), i32(top_k), token, report)
    x = logits.astype(np.float64)
    wanted = [sampled(x[b], *settings[b].astype(np.float64), top_k[b]) for b in range(B)]
    found, logprob = cp.asnumpy(token).tolist(), x - np.log(np.exp(x).sum(1, keepdims=True))
    # Float32 exponentials move a boundary by 1e-6 of the sum: a draw may land on the neighbour in order.
    assert sum(a != b for a, b in zip(found, wanted)) <= 1 and found[2] == 7
    np.testing.assert_allclose(cp.asnumpy(report)[:, 0], [logprob[b, t] for b, t in enumerate(found)], atol=1e-4)


def test_cuda_scratch_keeps_its_place():
    assert scratch.take("here", (4, 4)).data.ptr == scratch.take("here", (2, 8)).data.ptr
