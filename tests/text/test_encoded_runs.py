"""Texts that were encoded lately are not encoded again, and what is remembered stays within its bytes."""
import threading

from hypothesis import given
from hypothesis import strategies as st

from ds4mlx.text.encoded_runs import EncodedRuns


class Counting:
    """Encodes a text as its characters, and keeps what it was asked for."""

    def __init__(self):
        self.asked = []

    def __call__(self, runs):
        self.asked += runs
        return [[ord(character) for character in run] for run in runs]


def test_a_known_run_is_not_encoded_again():
    encode, runs = Counting(), EncodedRuns(1 << 20)
    first = runs.encode(["system", "question", "system"], encode)
    assert [list(ids) for ids in first] == [[ord(c) for c in run] for run in ("system", "question", "system")]
    assert runs.encode(["system", "question", "more"], encode)[:2] == first[:2]
    assert encode.asked == ["system", "question", "more"]


def test_the_run_used_longest_ago_goes_when_there_is_no_room():
    encode, runs = Counting(), EncodedRuns(800)   # three short ones
    for run in ("a", "b", "c", "a", "d"):
        runs.encode([run], encode)
    encode.asked.clear()
    runs.encode(["a", "c", "d", "b"], encode)
    assert encode.asked == ["b"]


def test_a_run_larger_than_the_room_is_encoded_and_not_kept():
    encode, runs = Counting(), EncodedRuns(2000)
    runs.encode(["a"], encode), runs.encode(["x" * 3000], encode), runs.encode(["a"], encode)
    assert encode.asked == ["a", "x" * 3000] and runs.nbytes < 2000


@given(st.lists(st.lists(st.text(max_size=40), max_size=6), max_size=20))
def test_any_texts_have_their_ids_and_the_room_is_kept(batches):
    encode, runs = Counting(), EncodedRuns(2000)
    for batch in batches:
        assert [list(ids) for ids in runs.encode(batch, encode)] == [[ord(c) for c in run] for run in batch]
        assert 0 <= runs.nbytes <= 2000


def test_several_threads_may_encode(v4_tokenizer):
    texts = [f"line {number} of some text, " * 50 for number in range(20)]
    alone, found = [v4_tokenizer.encode_literal(text) for text in texts], [[] for _ in range(4)]
    threads = [threading.Thread(target=lambda own=own: own.extend(map(v4_tokenizer.encode_literal, texts)))
               for own in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [alone] * 4
