"""Calls in a process of their own."""
import os

import pytest

from ds4mlx.engine.isolated import Child, ChildDied


def die(words):
    os.write(2, words.encode())
    os.abort()


@pytest.fixture(scope="module")
def child():
    with Child() as child:
        yield child


def test_a_call_runs_in_another_process_and_the_next_in_the_same(child):
    assert child.call(os.getpid) == child.call(os.getpid) != os.getpid()


def test_what_a_call_raises_is_raised(child):
    with pytest.raises(ValueError, match="invalid literal"):
        child.call(int, "no number")


def test_a_death_is_told_with_its_last_words_and_the_next_call_works(child):
    with pytest.raises(ChildDied, match="died; last words: out of luck"):
        child.call(die, "out of luck")
    assert child.call(int, "7") == 7
