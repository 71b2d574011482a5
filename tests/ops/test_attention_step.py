"""A step of several sequences: each sequence gets what `attention` gives it alone."""
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx import ops
from ds4mlx.metal_kernels.emulator import checking
from ds4mlx.ops.kernel import observe
from ds4mlx.ops.kv_round import fp8_pack

EPS, PAGE, WIDTH = 1e-6, 16, 128
NEAR = 4e-6     # float32 sums in another order, of rows of about unit size
BORDERS = (0, 1, 62, 63, 126, 127, 128, 254, 255, 256, 1000, 4999)   # of the window, of pages, of groups


class Step(NamedTuple):
    """What a model would pass for one token of each sequence, and the same sequences one by one."""
    q: mx.array
    cos: mx.array
    sin: mx.array
    windows: mx.array
    positions: mx.array
    rows: ops.Paged | None
    most: int
    chosen: mx.array | None
    ratio: int
    sink: mx.array

    def run(self):
        return np.array(ops.attention_step(*self, EPS))

    def alone(self, b):
        """Of sequence b by the op for one sequence, from rows in their order."""
        position, row = self.positions[b].item(), slice(b, b + 1)
        order = np.arange(max(position - self.windows.shape[1] + 1, 0), position + 1) % self.windows.shape[1]
        seen, rows = (position + 1) // self.ratio if self.ratio else 0, None
        if seen:
            rows = self.rows.at(mx.arange(seen))[b]
        chosen = self.chosen[row] if seen and self.chosen is not None else None
        return np.array(ops.attention(self.q[row], self.cos[row], self.sin[row], self.windows[b][mx.array(order)],
                                      position, rows, chosen, self.ratio, self.sink, self.windows.shape[1], EPS))[0]


@pytest.fixture
def step(rng):
    """step(positions, …): sequences of these lengths, their pages dealt out in no order."""
    def make(positions, ratio=0, k=0, heads=4, size=128, tail=64, width=WIDTH, packed=True, page_rows=PAGE):
        def made(*shape):
            made = mx.array(rng.normal(size=(*shape, size)).astype(np.float32))
            return fp8_pack(made, tail) if packed else made
        B, angle = len(positions), rng.uniform(0, 6, (len(positions), tail // 2))
        held = [(p + 1) // ratio if ratio else 0 for p in positions]
        rows = paged(rng, made, held, page_rows) if max(held) else None
        chosen, k = None, min(k, max(held))
        if k:
            chosen = np.sort(np.argsort(rng.random((B, max(held))))[:, :k].astype(np.int32))
            chosen = mx.array(np.where(np.array(held)[:, None] <= k, np.arange(k, dtype=np.int32), chosen))
        return Step(mx.array(rng.normal(size=(B, heads * size)).astype(np.float32)),
                    *(mx.array(f(angle).astype(np.float32)) for f in (np.cos, np.sin)), made(B, width),
                    mx.array(np.array(positions, np.int32)), rows, max(held), chosen, ratio,
                    mx.array(rng.normal(size=heads).astype(np.float32)))
    return make


def paged(rng, made, held, page_rows):
    """A pool in which sequence b has held[b] rows, on pages in no order; page 0 and ends of pages hold other rows."""
    pages = [-(-count // page_rows) for count in held]
    order = iter(1 + rng.permutation(sum(pages)))
    table = np.zeros((len(held), max(pages) + 1), np.int32)
    for b, count in enumerate(pages):
        table[b, :count] = [next(order) for _ in range(count)]
    return ops.Paged(made((sum(pages) + 1) * page_rows), mx.array(table), page_rows)


def check(step, atol=NEAR):
    together = step.run()
    for b in range(len(together)):
        np.testing.assert_allclose(together[b], step.alone(b), atol=atol)


@pytest.mark.parametrize(("ratio", "k"), [(0, 0), (4, 0), (128, 0), (4, 16)])
def test_each_sequence_gets_what_it_gets_alone(step, ratio, k, implementation):
    check(step(BORDERS, ratio, k))


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("positions", [[3000], [700, 2047, 2048]])
def test_sizes_of_flash(step, positions, packed, implementation):
    check(step(positions, 4, 512, heads=64, size=512, packed=packed, page_rows=512))
    check(step(positions, 128, heads=64, size=512, packed=packed))


@pytest.mark.parametrize("sizes", [{"heads": 12, "size": 192, "width": 5}, {"heads": 1, "size": 256, "tail": 128},
                                   {"heads": 3, "size": 66, "tail": 2, "packed": False}])
def test_other_models(step, sizes, implementation):
    check(step([0, 3, 4, 5, 50], 4, **sizes))


def test_rows_of_no_sequence_change_nothing(step, implementation):
    s = step([0, 41, 130], 4, packed=False)
    held = np.zeros(len(s.rows.rows), bool)
    for b, position in enumerate(s.positions.tolist()):
        r = np.arange((position + 1) // 4)
        held[np.array(s.rows.pages)[b, r // PAGE] * PAGE + r % PAGE] = True
    spoiled = mx.where(mx.array(held)[:, None], s.rows.rows, mx.nan)
    written = np.arange(WIDTH) <= np.array(s.positions)[:, None]
    windows = mx.where(mx.array(written)[..., None], s.windows, mx.nan)
    np.testing.assert_array_equal(s._replace(rows=replace(s.rows, rows=spoiled), windows=windows).run(), s.run())


def test_order_and_company_change_nothing(step, implementation):
    s = step([300, 7, 129, 2000], 4)
    back = mx.array([3, 2, 1, 0])
    turned = s._replace(q=s.q[back], cos=s.cos[back], sin=s.sin[back], windows=s.windows[back],
                        positions=s.positions[back], rows=replace(s.rows, pages=s.rows.pages[back]))
    np.testing.assert_allclose(turned.run()[::-1], s.run(), atol=NEAR)


def test_shapes_that_do_not_fit_are_refused(step):
    s = step([300, 20], 4, 8)
    for wrong in ({"cos": s.cos[:1]}, {"windows": s.windows[:1]}, {"windows": s.windows[..., 1:]},
                  {"positions": s.positions[:1]}, {"rows": None}, {"most": 10 ** 6}, {"chosen": s.chosen[:1]},
                  {"rows": replace(s.rows, pages=s.rows.pages[:1])}, {"rows": replace(s.rows, rows=s.sink[:, None])}):
        with pytest.raises(ValueError, match="attention_step"):
            s._replace(**wrong).run()


@pytest.mark.parametrize(("ratio", "k"), [(0, 0), (4, 0), (4, 8)])
def test_kernels_neither_race_nor_stray(step, ratio, k, emulated):
    with checking(races=True, debug=True):
        check(step([0, 250, 3], ratio, k, heads=9, size=192))


@pytest.mark.parametrize(("positions", "ratio", "k", "groups"), [
    ([1 << 16], 4, 512, [(8, 1, 7), (64, 1, 1)]), ([200, 9999], 4, 512, [(8, 2, 7), (64, 2, 1)]),
    ([9999] * 16, 4, 512, [(8, 16, 1)])])
def test_long_histories_are_split_unless_there_are_many(step, positions, ratio, k, groups, emulated):
    s, seen = step(positions, ratio, k, heads=64, size=512, page_rows=512), []
    with observe(lambda launch: seen.append(launch) or [mx.zeros(*output) for output in launch.outputs]):
        s.run()
    assert [launch.groups for launch in seen] == groups


@pytest.mark.sweep
@pytest.mark.parametrize("heads", [4, 64])
@pytest.mark.parametrize("page_rows", [1, 7, 16, 512])
@pytest.mark.parametrize("sequences", [1, 2, 5, 16])
def test_many_companies(step, rng, sequences, page_rows, heads, emulated):
    for ratio, k in [(0, 0), (4, 0), (4, 64), (4, 512), (128, 0)]:
        positions = rng.choice([*BORDERS, 8191, 20000], sequences).tolist()
        s = step(positions, ratio, k, heads, size=512, page_rows=page_rows)
        with ops.only("reference"):
            expected = s.run()
        np.testing.assert_allclose(s.run(), expected, atol=NEAR)
