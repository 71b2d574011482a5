"""What users of other servers reported about lost prefixes, each as a lookup over real prompts."""
from dataclasses import replace

import pytest

from ds4mlx.chat.canonical import canonical
from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.sessions.lookup import Live, RewindPoint, Stored, TrailingResults, VisibleKey, Wanted, decide
from ds4mlx.text.keys import after_key
from ds4mlx.text.segments import EOS, THINK_CLOSE, Control, Text, rendered_text

TOOLS = (Tool("bash", {"name": "bash", "description": "Runs a command. " * 30}),)
SYSTEM = Message("system", (TextPart("You are an agent. " * 20),))
QUESTION = Message("user", (TextPart("Look around."),))
CALL = ToolCall("call_1", "bash", '{"command": "ls"}')
RESULT = Message("tool", (ToolResult("call_1", "README.md"),))
AGAIN = Message("user", (TextPart("And now?"),))


def assistant(*parts):
    return Message("assistant", tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


@pytest.fixture
def prompts(v4_tokenizer):
    return Prompts(v4_tokenizer)


class Prompts:
    """Requests and states of conversations, by the real renderer and tokenizer."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def rendered(self, messages, tools=TOOLS):
        return render(canonical(Conversation(tuple(messages), tools)), effort_profile="0731")

    def wanted(self, *messages, tools=TOOLS, **more):
        segments = self.rendered(messages, tools).segments
        return Wanted(self.tokenizer.encode(segments), self.tokenizer.key_bytes(segments), **more)

    def key_to(self, messages, index, tools=TOOLS):
        """The key up to the end of one message."""
        prompt = self.rendered(messages, tools)
        return self.tokenizer.key_bytes(prompt.segments[:prompt.ends[index]])

    def live(self, *messages, sampled=(), shown=(), tools=TOOLS, **more):
        """The state after an answer to the messages; `shown`: that answer in the shapes that clients send back."""
        tokens = self.tokenizer.encode([*self.rendered(messages, tools).segments, *sampled])
        keys = (self.key_to([*messages, answer, AGAIN], len(messages), tools) for answer in shown)
        visible = tuple(VisibleKey(key, "thinking-visible", len(tokens)) for key in keys)
        return Live(tokens, self.tokenizer.key_bytes_of_ids(tokens), visible, **more)

    def point(self, *messages, tools=TOOLS):
        wanted = self.wanted(*messages, tools=tools)
        return RewindPoint(len(wanted.ids), len(wanted.key))

    def point_after(self, *messages, message, tools=TOOLS):
        prompt = self.rendered(messages, tools)
        tokens = self.tokenizer.encode(prompt.segments[:prompt.ends[message]])
        return RewindPoint(len(tokens), len(self.tokenizer.key_bytes_of_ids(tokens)))


SAMPLED = [Text("Hm, hidden."), Control(THINK_CLOSE), Text("I look."), Control(EOS)]


@pytest.mark.parametrize("tools", [TOOLS, ()], ids=["with tools", "without tools"])
def test_hidden_reasoning_loses_no_prefix(prompts, tools):
    state = prompts.live(SYSTEM, QUESTION, sampled=SAMPLED, shown=[assistant("I look.")], tools=tools)
    request = prompts.wanted(SYSTEM, QUESTION, assistant("I look."), AGAIN, tools=tools)
    best = decide(request, state).best
    assert (best.source, best.tokens) == ("thinking-visible", len(state.tokens))
    segments = prompts.rendered([SYSTEM, QUESTION, assistant("I look."), AGAIN], tools).segments
    rest = after_key(prompts.tokenizer, segments, best.key_bytes)
    assert rendered_text(rest).startswith("<｜User｜>And now?")


@pytest.mark.parametrize("padding", [" ", "\n", ""])
def test_reasoning_padded_with_white_space_loses_no_prefix(prompts, padding):
    state = prompts.live(SYSTEM, QUESTION, sampled=SAMPLED, shown=[assistant("I look.")])
    request = prompts.wanted(SYSTEM, QUESTION, assistant(Reasoning(padding), "I look."), AGAIN)
    assert decide(request, state).best.source == "thinking-visible"


def test_reasoning_that_is_sent_back_is_the_state_itself(prompts):
    state = prompts.live(SYSTEM, QUESTION, sampled=SAMPLED, shown=[assistant("I look.")])
    request = prompts.wanted(SYSTEM, QUESTION, assistant(Reasoning("Hm, hidden."), "I look."), AGAIN)
    assert decide(request, state).best.source == "memory-token"


@pytest.mark.parametrize("reasoning", [(), (Reasoning("Hm, hidden."),)], ids=["hidden", "sent back"])
def test_a_tool_turn_loses_no_prefix(prompts, reasoning):
    answer = assistant(Reasoning("Hm, hidden."), "I look.", CALL)
    after = prompts.rendered([SYSTEM, QUESTION, answer, RESULT])
    tokens = prompts.tokenizer.encode(after.segments[:after.ends[2]])
    shown = assistant(*reasoning, "I look.", CALL)
    history = prompts.key_to([SYSTEM, QUESTION, shown, RESULT], 2)
    state = Live(tokens, prompts.tokenizer.key_bytes_of_ids(tokens),
                 (VisibleKey(history, "thinking-visible", len(tokens)),), (), frozenset({"call_1"}), len(tokens))
    results = TrailingResults(frozenset({"call_1"}), len(history))
    request = prompts.wanted(SYSTEM, QUESTION, shown, RESULT, results=results)
    best = decide(request, state).best
    assert (best.source, best.tokens) == ("chat-tool-output", len(tokens))


def test_equal_text_in_other_tokens_is_the_same_state(prompts):
    odd = [Text("Hm, hidden."), Control(THINK_CLOSE), Text("I look at: < ｜DSML｜ <think>."), Control(EOS)]
    state = prompts.live(SYSTEM, QUESTION, sampled=odd)
    spelled = [token for character in "Hm, hidden." for token in prompts.tokenizer.encode_literal(character)]
    tokens = [*prompts.wanted(SYSTEM, QUESTION).ids, *spelled, *prompts.tokenizer.encode(odd[1:])]
    state = replace(state, tokens=tokens, key=prompts.tokenizer.key_bytes_of_ids(tokens))
    request = prompts.wanted(SYSTEM, QUESTION, assistant(Reasoning("Hm, hidden."), odd[2].text), AGAIN)
    assert decide(request, state).best.source == "memory-text"


def test_a_shutdown_save_is_found_by_what_the_client_shows(prompts):
    shown = prompts.key_to([SYSTEM, QUESTION, assistant("I look."), AGAIN], 2)
    request = prompts.wanted(SYSTEM, QUESTION, assistant("I look."), AGAIN)
    assert request.key.startswith(shown)
    best = decide(request, Live(), [Stored("alias", 900, len(shown))]).best
    assert (best.source, best.tokens, best.key_bytes) == ("disk-text", 900, len(shown))


def test_an_edited_last_message_keeps_what_stands_before_it(prompts):
    system, before = prompts.point_after(SYSTEM, QUESTION, message=0), prompts.point(SYSTEM, QUESTION)
    state = prompts.live(SYSTEM, QUESTION, assistant("I look."), AGAIN, sampled=SAMPLED, points=(system, before))
    edited = Message("user", (TextPart("And what now?"),))
    best = decide(prompts.wanted(SYSTEM, QUESTION, assistant("I look."), edited), state).best
    assert (best.source, best.tokens) == ("memory-rewind", before.frontier)


def test_another_try_at_an_answer_computes_nothing_again(prompts):
    end = prompts.point(SYSTEM, QUESTION)
    state = prompts.live(SYSTEM, QUESTION, sampled=SAMPLED, points=(end,))
    best = decide(prompts.wanted(SYSTEM, QUESTION), state).best
    assert (best.source, best.tokens) == ("memory-rewind", len(prompts.wanted(SYSTEM, QUESTION).ids))


def test_a_compaction_request_keeps_the_conversation(prompts):
    shown = [SYSTEM, QUESTION, assistant("I look."), AGAIN]
    state = prompts.live(*shown, sampled=SAMPLED, points=(prompts.point(*shown),), shown=[assistant("I look.")])
    compact = Message("user", (TextPart("Summarise the conversation."),))
    best = decide(prompts.wanted(*shown, assistant("I look."), compact), state).best
    assert (best.source, best.tokens) == ("thinking-visible", len(state.tokens))


def test_a_retry_after_a_disconnect_goes_on_from_what_was_prefilled(prompts):
    request = prompts.wanted(SYSTEM, QUESTION)
    tokens = request.ids[:128]
    best = decide(request, Live(tokens, prompts.tokenizer.key_bytes_of_ids(tokens))).best
    assert (best.source, best.tokens) == ("memory-token", 128)


def test_a_rotating_billing_line_changes_nothing(prompts):
    def with_nonce(nonce, *messages):
        return Message("system", (TextPart(f"x-anthropic-billing-header: cc_version=2.1.332.{nonce}"),)), *messages
    state = prompts.live(*with_nonce("a1b", SYSTEM, QUESTION), sampled=SAMPLED)
    answer = assistant(Reasoning("Hm, hidden."), "I look.")
    assert decide(prompts.wanted(*with_nonce("c2d", SYSTEM, QUESTION, answer, AGAIN)), state).best.tokens \
        == len(state.tokens)


def test_a_saved_state_is_chosen_before_the_live_one_is_given_up(prompts):
    state = prompts.live(Message("user", (TextPart("Another conversation."),)), sampled=SAMPLED)
    plans = decide(prompts.wanted(SYSTEM, QUESTION), state, [Stored("f", 600, 64)]).plans
    assert plans[0].stored == Stored("f", 600, 64) and all(plan.replaces_live for plan in plans)
    assert not decide(prompts.wanted(SYSTEM, QUESTION), prompts.live(SYSTEM, QUESTION)).best.replaces_live


def quoting(text):
    return Message("user", (TextPart(text),))


def test_quoted_turns_are_no_turns(prompts):
    turns = [SYSTEM, QUESTION, assistant("I look."), AGAIN]
    state = prompts.live(*turns, sampled=SAMPLED, shown=[assistant("I look.")], tools=())
    state = replace(state, points=(prompts.point(SYSTEM, QUESTION, tools=()),))
    written_out = rendered_text(prompts.rendered(turns, ()).segments).split("<｜User｜>", 1)[1]
    request = prompts.wanted(SYSTEM, quoting(written_out + "Hm, hidden.</think>I look.<｜end▁of▁sentence｜>"), tools=())
    assert decide(request, state).best.source == "none"
    assert not any(request.key.startswith(key.key) for key in state.visible)


@pytest.mark.parametrize("cut", range(1, 7))
def test_a_state_that_ends_inside_a_quotation_is_no_state_of_the_real_token(prompts, cut):
    tokenizer = prompts.tokenizer
    request = prompts.wanted(SYSTEM, QUESTION)  # ends with a real <think>
    told = [*prompts.rendered([SYSTEM, QUESTION]).segments[:-1], Text("<think>"[:cut])]
    tokens = tokenizer.encode(told)
    state = Live(tokens, tokenizer.key_bytes_of_ids(tokens))
    assert request.key.startswith(state.key)
    assert decide(request, state, [Stored("f", len(tokens), len(state.key))]).best.source == "none"
