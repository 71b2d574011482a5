"""Agents send everything again each turn: only what is new may be computed, whatever they leave out or rewrite.

Expected numbers come from the rendered prompts and the script: a state holds its prompt, its answer and EOS.
"""
import pytest
from client_shapes import CLIENTS, call
from host import user

ANSWERS = ["I look first.</think>Let me see.\n\n" + call(), "That was it.</think>All is well.", "Again?</think>Sure."]


@pytest.fixture(params=CLIENTS, ids=lambda client: client.name)
def client(request):
    return request.param


def play(host, client, keeps_reasoning, between=lambda: None):
    """Three turns: a call, its result, a further question. Replies, and what each had to reuse and to compute."""
    messages, state, known, replies, expected = client.opening("Look around."), 0, 0, [], []
    for answer, follow in zip(ANSWERS, (lambda m: client.results(m, "a b"), lambda m: user("And now?"), None)):
        conversation = client.conversation(*messages)
        new = host.tail(conversation, known)
        replies.append(host.ask(conversation, api=client.api))
        expected.append((state, state + new))
        state += new + len(host.tokenizer.encode_marked(answer)) + 1
        message = client.echo(replies[-1].message, keeps_reasoning)
        known = len(messages) + 1
        messages = (*messages, message, follow(message)) if follow else messages
        between()
    return replies, expected


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_each_turn_goes_on_from_the_live_state(host, client, keeps_reasoning):
    replies, expected = play(host(ANSWERS), client, keeps_reasoning)
    assert [(r.reused, r.prompt) for r in replies] == expected
    later = "responses-visible" if client.api == "responses" else \
        "memory-token" if keeps_reasoning else "thinking-visible"
    first = "responses-visible" if client.api == "responses" else f"{client.api}-tool-output"
    assert [r.source for r in replies] == ["none", first, later]


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_each_turn_goes_on_from_disk_after_a_restart(host, client, keeps_reasoning, tmp_path):
    running = host(ANSWERS, kv_disk_dir=tmp_path / "kv")
    replies, expected = play(running, client, keeps_reasoning, running.restart)
    assert [(r.reused, r.prompt) for r in replies] == expected
    assert [r.source for r in replies] == ["none", "disk-text", "disk-text"]


def test_the_engine_computes_no_more_than_it_is_said_to(host, client):
    replies, _ = play(host(ANSWERS), client, keeps_reasoning=False)
    assert all(r.computed <= r.prompt - r.reused + 2 for r in replies)   # 2: the last token sampled, and EOS
