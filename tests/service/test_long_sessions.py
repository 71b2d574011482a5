"""Whole sessions: what is computed again over forty turns, restarts, side requests and other conversations."""
from dataclasses import replace

import pytest
from client_shapes import CLIENTS, MAIN, call
from host import said, system, talk, user, without_reasoning

CLAUDE, CODEX, OPENCODE, PI = CLIENTS
CALLS = [f"Step {n}.</think>Next.\n\n" + call(n) for n in range(100)]
LONG = "Some output of a command, a line of it. " * 20


class Session:
    """One client's conversation. `again`: tokens that were computed although they had been before."""

    def __init__(self, client, **opening):
        self.client, self.answers, self.again, self.state, self.known = client, (), 0, 0, 0
        self.begin(**opening)

    def begin(self, prompt="Do it.", **opening):
        """The head of the next request, which some clients write anew each time."""
        self.head = self.client.opening(prompt, **opening)

    def turn(self, host, text=LONG, keeps_reasoning=False):
        conversation = self.client.conversation(*self.head, *self.answers)
        reply, new = host.ask(conversation, api=self.client.api), host.tail(conversation, self.known)
        self.again += reply.prompt - reply.reused - new
        message = self.client.echo(reply.message, keeps_reasoning)
        self.known = len(self.head) + len(self.answers) + 1
        self.answers = (*self.answers, message, self.client.results(message, text))
        self.state = reply.state
        return reply


@pytest.mark.parametrize("restart_every", [1, 13, 40])
@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_forty_turns_with_restarts_compute_under_one_percent_again(host, tmp_path, restart_every, keeps_reasoning):
    running, session = host(CALLS, kv_disk_dir=tmp_path / "kv"), Session(CLAUDE)
    for number in range(41):
        session.begin(nonce=number)    # the billing line is another one in each request
        reply = session.turn(running, keeps_reasoning=keeps_reasoning)
        if number % restart_every == restart_every - 1:
            running.restart()
    assert reply.reused > 40 * len(LONG) and session.again < 0.01 * reply.prompt


@pytest.mark.parametrize("restart, source", [(False, "memory-rewind"), (True, "disk-text")])
def test_a_new_session_with_another_git_status_shares_system_text_and_tools(host, tmp_path, restart, source):
    running = host(CALLS, kv_disk_dir=tmp_path / "kv")
    Session(CLAUDE, status="clean").turn(running)
    if restart:
        running.restart()
    conversation = CLAUDE.conversation(*CLAUDE.opening("Do it.", nonce=2, status="1 file changed"))
    reply = running.ask(conversation, api=CLAUDE.api)
    assert (reply.source, reply.reused) == (source, reply.prompt - running.tail(conversation, 1))
    assert restart or "differs=messages[1]" in reply.line


def test_a_git_status_inside_the_system_text_costs_at_most_an_interval_more(host):
    running, text = host(CALLS), MAIN * 4    # the tools follow the system text
    first, second = (OPENCODE.conversation(system(text + status), user("Do it.")) for status in ("clean", "dirty"))
    replies = [running.ask(first), running.ask(second)]
    same = 1 + len(text)                     # BOS and the text before the status
    assert (replies[1].source, replies[1].reused) == ("memory-rewind", same - same % 2048)


def test_another_answer_to_the_same_prompt_costs_at_most_two_tokens(host):
    running, session = host(CALLS), Session(PI)
    for _ in range(3):
        reply = session.turn(running)
    question = PI.conversation(*session.head, *session.answers[:4])
    again = running.ask(question)
    assert again.prompt - again.reused <= 2 and again.message.parts[:2] == reply.message.parts[:2]


@pytest.mark.parametrize("edited", [LONG + "!", "!" + LONG, LONG * 9 + "!", LONG * 4 + "!" + LONG * 5])
def test_an_edited_last_message_costs_its_edited_part_and_an_interval(host, edited):
    running, first = host(["Yes.</think>Fine."]), (system(MAIN), user(LONG))
    answer = running.ask(talk(*first)).message
    before, after = talk(*first, answer, user(LONG * 9)), talk(*first, answer, user(edited))
    running.ask(before)
    reply = running.ask(after)
    same = next((i for i, (a, b) in enumerate(zip(edited, LONG * 9)) if a != b), len(LONG) * 9)
    assert reply.prompt - reply.reused <= len(edited) - same + 4 + 2048   # 4: the controls around the message


def test_a_client_that_leaves_during_prefill_finds_what_was_computed(host):
    running, slices = host(CALLS, prefill_chunk=128), []

    def leave():
        slices.append(0)
        if len(slices) == 3:
            running.service.scheduler.requests[0].cancel("cancelled")

    running.engine.before_prefill = leave
    question = talk(user(LONG))
    running.ask(question)
    reply = running.ask(question)
    assert (reply.source, reply.reused) == ("memory-token", 3 * 128)


def test_a_client_that_leaves_during_decode_finds_its_prompt(host):
    running, question, steps = host(CALLS), talk(user(LONG)), []

    def leave():
        steps.append(0)
        if len(steps) == 3:
            running.service.scheduler.requests[0].cancel("cancelled")

    running.engine.before_decode = leave
    running.ask(question)
    reply = running.ask(question)
    assert (reply.source, reply.reused) == ("memory-rewind", reply.prompt) and reply.computed <= 2


@pytest.mark.parametrize("tools, header", [(False, 2), (True, 0)])
def test_an_answer_cut_at_a_stop_string_goes_back_to_its_question(host, tools, header):
    running = host(["Plan.</think>One STOP two"])
    ask = PI.conversation if tools else talk
    first = running.ask(ask(user(LONG)), stop=("STOP",))
    reply = running.ask(ask(user(LONG), first.message, user("And?")))
    assert (reply.source, reply.reused) == ("memory-rewind", first.prompt - header)   # without tools, no reasoning


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_an_answer_cut_at_its_limit_is_gone_on_with(host, tmp_path, keeps_reasoning, restart):
    running = host(["Plan.</think>A long story without end."], kv_disk_dir=tmp_path / "kv")
    first = running.ask(PI.conversation(user(LONG)), max_tokens=len("Plan.</think>A") - len("</think>") + 1 + 5)
    assert first.end.reason == "length" and first.state == first.prompt + first.said
    if restart:
        running.restart()
    message = PI.echo(first.message, keeps_reasoning)
    reply = running.ask(PI.conversation(user(LONG), message, user("Go on")))
    live = "memory-token" if keeps_reasoning else "thinking-visible"
    assert (reply.source, reply.reused) == ("disk-text" if restart else live, first.state)


def test_a_begun_answer_is_gone_on_with_and_found_by_the_next_turn(host):
    running, begun, whole = host(["story", "The end.</think>Yes."]), said("Once upon a "), said("Once upon a story")
    first = running.ask(replace(PI.conversation(user(LONG), begun), continue_final=True))
    reply = running.ask(PI.conversation(user(LONG), whole, user("And?")))
    assert (reply.source, reply.reused) == ("thinking-visible", first.state)


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_after_a_side_request_the_conversation_goes_on_from_before_it(host, keeps_reasoning):
    running, session = host(CALLS), Session(CLAUDE)
    for _ in range(3):
        session.turn(running, keeps_reasoning=keeps_reasoning)
    state = session.state
    history = (*session.head, *session.answers)
    aside = running.ask(CLAUDE.conversation(*history, user("Summarize all of it.")), api=CLAUDE.api)
    assert aside.reused == state
    reply = session.turn(running, keeps_reasoning=keeps_reasoning)
    assert reply.source == "memory-rewind" and reply.reused >= state


@pytest.mark.parametrize("client", [CODEX, OPENCODE], ids=lambda client: client.name)
def test_a_side_request_with_another_head_costs_no_conversation(host, tmp_path, client):
    running, session = host(CALLS, kv_disk_dir=tmp_path / "kv"), Session(client)
    for _ in range(3):
        session.turn(running)
    running.ask(talk(*session.head[:-1], user("A title, please."), tools=()), api=client.api)   # no tools
    reply = session.turn(running)
    assert reply.source == "disk-text" and session.again == 0


@pytest.mark.parametrize("text, lost", [(LONG, 0), ("ok", 512)])
def test_two_conversations_take_turns_on_one_slot(host, tmp_path, text, lost):
    running = host(CALLS, kv_disk_dir=tmp_path / "kv")
    sessions = [Session(PI, prompt=f"{LONG} {name}") for name in "AB"]
    for _ in range(8):
        for session in sessions:
            state = session.state
            reply = session.turn(running, text)
            assert reply.reused >= state - lost, reply.line


@pytest.mark.parametrize("begins, more, source", [(300, 100, "thinking-visible"), (300, 400, "memory-rewind"),
                                                  (20, 600, "none")])
def test_reasoning_that_the_client_left_out_goes_when_the_context_has_no_room_for_it(host, begins, more, source):
    running = host(["Hm. " * 100 + "</think>Yes.", "</think>No."], ctx=1000)
    first = running.ask(talk(user("x" * begins)))
    history = user("x" * begins), without_reasoning(first.message)
    reply = running.ask(talk(*history, user("y" * more)))
    assert reply.end.reason == "stop" and reply.source == source and (reply.reused >= begins or source == "none")
    assert reply.line.startswith(f"{source}; reused={reply.reused};")
