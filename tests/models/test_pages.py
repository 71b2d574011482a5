import gc

import mlx.core as mx
import numpy as np
import pytest

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS, Pages, PageTable, Pool, SequenceRows, page_count

ROW = schema.Row(4, np.dtype(np.float32))
ROWS = PAGE_TOKENS // 4     # of a page


@pytest.fixture
def pages():
    """Of one pool, of a row for every 4 tokens."""
    return Pages([Pool(4, ROW)])


@pytest.fixture
def sequence(pages):
    """sequence(context=None): the rows of a new sequence."""
    return lambda context=None: SequenceRows(pages.pools[0], PageTable(pages, context))


def numbered(first, last):
    """A row of the number of each row."""
    return mx.broadcast_to(mx.arange(first, last)[:, None], (last - first, 4)).astype(mx.float32)


def append(rows, first, last):
    for start in range(first, last, 37):
        rows.write(start, numbered(start, min(start + 37, last)))


def holds(rows, last, first=0):
    return mx.array_equal(rows.view(first, last), numbered(first, last))


def test_rows_keep_what_was_written_while_the_pool_grows(sequence):
    rows = sequence()
    append(rows, 0, 5 * ROWS + 3)
    assert holds(rows, 5 * ROWS + 3) and holds(rows, 3 * ROWS, first=2 * ROWS - 1) and rows.view(7, 7).size == 0


def test_sequences_that_grow_by_turns_keep_apart(sequence):
    one, other = sequence(), sequence()
    for page in range(4):
        append(one, page * ROWS, (page + 1) * ROWS)
        append(other, page * ROWS, (page + 1) * ROWS)
    assert holds(one, 4 * ROWS) and holds(other, 4 * ROWS)
    assert not {*one.table.entries} & {*other.table.entries} and 0 not in one.table.entries


def test_rows_cut_back_are_written_over_and_earlier_views_stay(sequence):
    rows = sequence()
    append(rows, 0, 10)
    view = rows.view(0, 10)
    rows.write(6, mx.zeros((2, 4)))
    assert mx.array_equal(view, numbered(0, 10)) and rows.view(6, 8).sum().item() == 0 and holds(rows, 6)


def test_a_pool_has_room_for_every_context_and_for_no_more(sequence, pages):
    contexts = [700, 2048, 3 * PAGE_TOKENS + 4, 130]
    everything = [sequence(context) for context in contexts]
    for rows, context in zip(everything, contexts):
        append(rows, 0, context // 4)
    assert pages.held == sum(map(page_count, contexts)) == pages.capacity - 1


def test_what_a_sequence_lets_go_of_is_used_again(sequence, pages):
    rows = sequence()
    append(rows, 0, 4 * ROWS)
    capacity = pages.capacity
    rows.table.cut(PAGE_TOKENS + 1)
    assert pages.held == 2
    other = sequence()
    append(other, 0, 2 * ROWS)
    assert pages.held == 4 and pages.capacity == capacity


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_sequence_that_is_over_holds_nothing(end, sequence, pages):
    rows = sequence(PAGE_TOKENS)
    append(rows, 0, ROWS)
    if end == "closed":
        rows.table.close()
    del rows
    gc.collect()
    assert pages.held == 0


def test_a_shared_page_is_copied_before_it_is_written_to(sequence, pages):
    one, other = sequence(), sequence()
    append(one, 0, 2 * ROWS + 5)
    other.table.share(one.table, 4 * (2 * ROWS + 5))
    assert pages.held == 3 and holds(other, 2 * ROWS + 5)
    other.write(2 * ROWS + 5, mx.zeros((3, 4)))
    append(one, 2 * ROWS + 5, 2 * ROWS + 9)
    assert holds(one, 2 * ROWS + 9) and holds(other, 2 * ROWS + 5) and pages.held == 4
    assert other.view(2 * ROWS + 5, 2 * ROWS + 8).sum().item() == 0


def test_shared_pages_outlive_the_sequence_that_made_them(sequence, pages):
    one, other, third = sequence(), sequence(), sequence()
    append(one, 0, 2 * ROWS)
    other.table.share(one.table, 2 * PAGE_TOKENS)
    one.table.close()
    append(third, 0, 3 * ROWS)
    assert holds(other, 2 * ROWS) and pages.held == 5


def test_as_many_sharing_sequences_as_were_promised_find_room_for_copies(sequence, pages):
    sequences = [sequence(2 * PAGE_TOKENS) for _ in range(5)]
    append(sequences[0], 0, ROWS + 1)
    for other in sequences[1:]:
        other.table.share(sequences[0].table, PAGE_TOKENS + 4)
    for rows in sequences:
        append(rows, ROWS + 1, 2 * ROWS)
    assert all(holds(rows, 2 * ROWS) for rows in sequences) and pages.held == 6


def test_a_pool_that_could_not_grow_is_tried_again(monkeypatch):
    pages = Pages([Pool(4, ROW), Pool(128, ROW)])
    one, other = (SequenceRows(pool, PageTable(pages)) for pool in pages.pools)
    append(one, 0, ROWS)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(mx, "eval", exhausted)
        other.write(0, mx.zeros((1, 4)))
    assert holds(one, ROWS) and pages.held == 1 and other.table.entries == []
    other.write(0, numbered(0, 16))
    assert holds(one, ROWS) and holds(other, 16) and pages.held == 2


def exhausted(*arrays):
    raise MemoryError
