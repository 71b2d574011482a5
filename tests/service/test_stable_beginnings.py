"""A git status inside the system text changes from session to session: what stands before it is found on disk."""
import pytest
from client_shapes import CLIENTS, MAIN
from host import system, user

from ds4mlx.text.segments import BOS

OPENCODE = CLIENTS[2]
STABLE = MAIN * 4    # the tools follow the system text, as most of its bytes do in a real one
PLACE = (1 + len(STABLE) - 32) // 128 * 128


def session(status):
    return OPENCODE.conversation(system(STABLE + f"{status} is changed." + MAIN * 2), user("Do it."))


@pytest.fixture
def running(host, tmp_path):
    return host(["Done.</think>All of it."], kv_disk_dir=tmp_path / "kv")


def test_the_third_session_goes_on_from_before_its_status_whatever_restarts_there_are(running):
    replies = []
    for status in ("a.py", "b.py", "c.py", "d.py"):
        replies.append(running.ask(session(status)))
        running.restart()
    assert [(reply.source, reply.reused) for reply in replies] == [
        ("none", 0), ("none", 0), ("disk-text", PLACE), ("disk-text", PLACE)]


def test_two_sessions_without_a_restart_show_it_as_well(running):
    running.ask(session("a.py")), running.ask(session("b.py"))
    running.restart()
    reply = running.ask(session("c.py"))
    assert (reply.source, reply.reused) == ("disk-text", PLACE)


def test_a_miss_after_a_restart_names_the_text_that_differs_from_what_is_saved(running):
    running.ask(session("a.py"))
    running.restart()
    assert f"differs=messages[0]+{len(BOS.encode()) + len(STABLE)}" in running.ask(session("b.py")).line


def test_a_prompt_that_shares_too_little_saves_nothing_more(running):
    running.ask(OPENCODE.conversation(system("x" * 300 + MAIN * 3), user("Do it.")))
    saved = running.store.stats().saved
    running.ask(OPENCODE.conversation(system("x" * 300 + "y" + MAIN * 3), user("Do it.")))
    assert running.store.stats().saved == saved + 1    # its anchor, as the first one's
