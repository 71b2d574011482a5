"""The whole way on the tiny model: a restart changes no bit of what comes next."""
import numpy as np
import pytest
from host import system, talk, user

from ds4mlx.config import Settings
from ds4mlx.engine.open import open_engine
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

QUESTION = (system("You are brief. " * 100), user("Say something."))


@pytest.fixture
def served(host, tiny_path, tmp_path):
    """served(directory, slots): a Host over the tiny model."""
    with GGUF.open(tiny_path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    def start(directory, slots=1):
        settings = Settings(ctx=4096, model=tiny_path, batched_session=slots)
        return host([""], engine=lambda script, **_: open_engine(settings), tokenizer=tokenizer, ctx=4096,
                    batched_session=slots, kv_disk_dir=tmp_path / directory)

    return start


def two_turns(running, between=lambda: None):
    first = running.ask(talk(*QUESTION), max_tokens=40)
    between()
    second = running.ask(talk(*QUESTION, first.message, user("And more?")), max_tokens=40)
    return second, running.tokens, running.service.scheduler.slots[0].session.logits()


def test_a_restart_changes_no_bit(served):
    live, restarted = served("one"), served("two")
    a, tokens, logits = two_turns(live)
    b, other_tokens, other_logits = two_turns(restarted, restarted.restart)
    assert (a.reused, a.message, tokens) == (b.reused, b.message, other_tokens) and a.reused > 512
    assert b.source == "disk-text" and np.array_equal(logits, other_logits)


def test_conversations_answered_together_get_the_answers_that_they_get_alone(served):
    """Six on four slots, which share a system text; two of them wait."""
    together, alone = served("one", slots=4), served("two")
    questions = [talk(QUESTION[0], user(f"Say number {n}. " * (5 * n + 1))) for n in range(6)]
    begun = [together.begin(question, max_tokens=30) for question in questions]
    replies = [together.end(answer, settle=False) for answer in begun]
    expected = [alone.ask(question, max_tokens=30).message for question in questions]
    assert [reply.message for reply in replies] == expected
    assert any("from-slot" in reply.line for reply in replies)
