"""Several conversations at once: who goes on from what, in which slot."""
import json

import pytest
from client_shapes import CLIENTS, call
from host import system, talk, user, without_reasoning

from ds4mlx.engine.stub import Gate
from ds4mlx.service.trace import Trace

CLAUDE, PI = CLIENTS[0], CLIENTS[-1]
SYSTEM = "Be brief, be exact, and do not guess. " * 40
LONG = "Some output of a command, a line of it. " * 20
ANSWERS = [f"Step {n}.</think>Next.\n\n" + call(n) for n in range(100)]
TURNS, SUBAGENTS = 12, 5


class Thread:
    """One conversation: the main one of an agent, or a subagent's."""

    def __init__(self, name, client=PI, task=""):
        self.client, self.messages = client, (system(SYSTEM + name), user(f"Do {name}. {task}"))
        self.known = self.state = 0

    def turn(self, host, text=LONG):
        """The Reply, and the tokens that it had to compute at least."""
        conversation = self.client.conversation(*self.messages)
        new = host.tail(conversation, self.known)
        reply = host.ask(conversation, api=self.client.api)
        self.known = len(self.messages) + 1
        message = self.client.echo(reply.message, keeps_reasoning=False)
        self.messages = (*self.messages, message, self.client.results(message, text))
        self.state = reply.prompt + reply.said + 1
        return reply, new


def test_the_main_thread_loses_nothing_by_five_subagents(host, tmp_path):
    running = host(ANSWERS, batched_session=3, kv_disk_dir=tmp_path / "kv")
    main, subagents = Thread("main", task=LONG), [Thread(f"subtask {n}") for n in range(SUBAGENTS)]
    for number in range(TURNS):
        before = main.state
        reply, new = main.turn(running, LONG * 3)
        assert reply.reused == before and reply.prompt - reply.reused == (new if number else reply.prompt)
        for subagent in subagents:
            subagent.turn(running, "ok")


@pytest.mark.parametrize("text", [LONG, "ok"])
def test_more_conversations_than_slots_come_back_from_disk(host, tmp_path, text):
    running = host(ANSWERS, batched_session=2, kv_disk_dir=tmp_path / "kv")
    threads = [Thread("main"), *(Thread(f"subtask {n}") for n in range(SUBAGENTS))]
    for number in range(TURNS):
        for thread in threads:
            before = thread.state
            reply, _ = thread.turn(running, text)
            assert number == 0 or reply.source != "none" and reply.reused >= before - 512, reply.line


def test_interleaved_conversations_each_go_on_in_their_slot(host):
    running = host(ANSWERS, batched_session=3)
    threads = [Thread(name) for name in ("one", "two", "three")]
    for _ in range(4):
        for number, thread in enumerate(threads):
            before = thread.state
            reply, _ = thread.turn(running)
            assert reply.reused == before or before == 0
            assert len(running.service.scheduler.slots[number].session.tokens) == thread.state


# ---- sharing

def test_a_subagent_shares_the_system_text_of_the_main_thread(host):
    running = host(ANSWERS, batched_session=2)
    main = running.ask(talk(system(SYSTEM), user("The main task. " + LONG)))
    side = talk(system(SYSTEM), user("A subtask."))
    reply = running.ask(side)
    assert (reply.source, reply.reused) == ("memory-rewind", reply.prompt - running.tail(side, 1))
    assert "from-slot=0" in reply.line and len(running.tokens) == main.state


def test_a_prompt_shares_with_a_slot_that_is_decoding(host):
    running, gate = host(["Plan.</think>Yes."], batched_session=2), Gate()
    running.engine.before_decode = gate
    first = running.begin(talk(system(SYSTEM), user("The main task.")))
    assert gate.reached.wait(60)
    second = running.begin(talk(system(SYSTEM), user("A subtask.")))
    gate.opened.set()
    replies = [running.end(first), running.end(second)]
    assert [reply.message.parts[-1].text for reply in replies] == ["Yes.", "Yes."]
    assert "from-slot=0" in replies[1].line


def test_what_a_client_may_send_back_of_a_shared_state_still_leads_to_it_when_the_other_slot_is_gone(host):
    running, gate = host(["Plan.</think>Yes."], batched_session=2), Gate()
    first = running.ask(talk(system(SYSTEM), user("The task.")))
    history = system(SYSTEM), user("The task."), without_reasoning(first.message)   # no prefix of the state's tokens
    running.engine.before_decode = gate
    going_on = running.begin(talk(*history, user("Go on.")))
    assert gate.reached.wait(60)
    forked = running.begin(talk(*history, user("Another way.")))
    gate.opened.set()
    replies = [running.end(going_on, settle=False), running.end(forked)]
    running.service.scheduler.slots[0] = None               # as after a failure of the engine
    replies.append(running.ask(talk(*history, user("A third way. " * 60))))
    assert [reply.reused for reply in replies] == [first.state] * 3


def test_what_the_own_slot_has_goes_before_as_much_in_another(host):
    running = host(["Plan.</think>Yes."], batched_session=2)
    question = talk(system(SYSTEM), user("The main task. " + LONG))
    first = running.ask(question)
    other = running.ask(talk(system(SYSTEM), user("A subtask.")))
    again = running.ask(question)
    assert again.reused >= first.prompt - 2 and "from-slot" not in again.line and "from-slot=0" in other.line


def test_a_prompt_that_shares_no_place_to_go_back_to_is_told_what_it_parts_from(host):
    running = host(["Plan.</think>Yes."], batched_session=2)
    text = "The same beginning of a system text. " * 4
    running.ask(talk(system(text + "one"), user("Hi")))
    reply = running.ask(talk(system(text + "two"), user("Hi")))
    assert reply.source == "none" and "beside-slot=0" in reply.line and f"common={1 + len(text)}" in reply.line


# ---- slots

def test_with_a_free_slot_a_request_that_shares_the_system_text_evicts_no_conversation(host):
    """A request with nothing but the system text in common took the slot of a 90k-token session beside an empty one."""
    running = host(ANSWERS, batched_session=2)
    main = Thread("main")
    for _ in range(3):
        main.turn(running)
    running.ask(PI.conversation(main.messages[0], user("A title, please.")))
    before = main.state
    reply, new = main.turn(running)
    assert reply.reused == before and reply.prompt - reply.reused == new


def test_a_session_hint_keeps_an_edited_conversation_in_its_slot(host):
    running = host(["Plan.</think>Yes."], batched_session=3)
    def edited(text):
        return talk(system(SYSTEM), user(text), ids=("a session",))

    running.ask(edited("One."))
    running.ask(talk(user("Something else.")))
    reply = running.ask(edited("Two."))
    assert reply.reused > 512 and "from-slot" not in reply.line
    assert [use.tokens > 0 for use in running.service.scheduler.use] == [True, True, False]


def test_side_calls_that_share_the_hint_of_the_main_thread_leave_it_alone(host):
    running = host(ANSWERS, batched_session=2)
    main = Thread("main", CLAUDE)
    for _ in range(4):
        main.turn(running, LONG * 3)
    for number in range(3):
        running.ask(talk(system(f"Title maker {number}. " * 60), user("A title?"), ids=("user",)), api="anthropic")
    before = main.state
    assert main.turn(running)[0].reused == before


def test_a_session_that_cannot_be_closed_costs_no_other_its_save(host, tmp_path):
    running = host(ANSWERS, batched_session=2, kv_disk_dir=tmp_path / "kv", kv_cache_cold_max_tokens=0)
    threads = [Thread("one"), Thread("two", task=LONG)]
    states = [thread.turn(running) and thread.state for thread in threads]
    running.service.scheduler.slots[0].session.close = lambda: 1 / 0
    running.restart()
    assert [thread.turn(running)[0].reused for thread in threads] == states


# ---- as the trace tells it

@pytest.mark.parametrize("second, donor", [(SYSTEM, 0), (SYSTEM[:200] + "!", None)])
def test_the_trace_names_the_slot_that_shared_or_was_compared_with(host, tmp_path, second, donor):
    running = host(["Plan.</think>Yes."], batched_session=2)
    running.service.trace = Trace(tmp_path / "trace", "jsonl")
    for text, question in ((SYSTEM, LONG), (second, "A subtask.")):
        running.ask(talk(system(text), user(question)))
    told = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines() if '"type": "cache"' in line][1]
    assert (told["slot"], told["beside"], told["donor"], told["cached_tokens"] > 0) == (1, 0, donor, donor == 0)


def test_a_trace_for_people_names_it_as_well(host, tmp_path):
    running = host(["Plan.</think>Yes."], batched_session=2)
    running.service.trace = Trace(tmp_path / "trace", "text")
    for text in (LONG, "A subtask."):
        running.ask(talk(system(SYSTEM), user(text)))
    assert "\nslot: 1  shares: slot 0\n" in (tmp_path / "trace").read_text()
