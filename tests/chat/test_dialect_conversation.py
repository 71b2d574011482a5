"""From a conversation to the prompt: what a client sends, and what the model reads."""
import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import (
    Conversation, Message, Reasoning, TextPart, Tool, ToolCall, ToolReference, ToolResult)
from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import ASSISTANT, BOS, CONTROL_LITERALS, EOS, THINK_CLOSE, THINK_OPEN, USER, rendered_text

ASK = ASSISTANT + THINK_OPEN
ECHO = Tool("echo", {"name": "echo", "parameters": {"type": "object"}})
CALL = ToolCall("c1", "echo", '{"text": "hi"}')


def said(role, *parts):
    return Message(role, tuple(TextPart(part) if isinstance(part, str) else part for part in parts))


def prompt(*messages, layout="official", **fields):
    return render(Conversation(messages, **fields), effort_profile="0731", layout=layout)


def text(*messages, **fields):
    return rendered_text(prompt(*messages, **fields).segments)


def test_the_leading_system_messages_are_one_region():
    rendered = text(said("system", "A"), said("system", ""), said("system", "B", "C"), said("user", "Q"))
    assert rendered == f"{BOS}A\n\nBC{USER}Q{ASK}"


def test_a_late_system_message_leaves_all_earlier_bytes_unchanged():
    turns = [said("system", "S"), said("user", "One"), said("assistant", "Yes."), said("user", "Two")]
    before, after = text(*turns), text(*turns, said("system", "It is Monday."))
    assert after == before.removesuffix(ASK) + "\n\nIt is Monday." + ASK


def test_an_appended_reminder_leaves_all_earlier_bytes_unchanged():
    turns = [said("system", "S"), said("user", "One")]
    assert text(*turns, said("latest_reminder", "Monday")) == text(*turns) + "<｜latest_reminder｜>Monday"


def test_an_empty_late_system_message_vanishes():
    assert text(said("user", "Q"), said("system", "")) == text(said("user", "Q"))


def test_texts_of_one_message_are_joined_and_results_are_blocks():
    turn = said("user", ToolResult("c1", "R"), "a", "b")
    rendered = text(said("user", "Q"), said("assistant", CALL), turn)
    assert rendered.endswith(f"{USER}<tool_result>R</tool_result>\n\nab{ASK}")


def test_results_follow_the_order_of_their_calls():
    calls = said("assistant", ToolCall("a", "x", "{}"), ToolCall("b", "y", "{}"))
    rendered = text(said("user", "Q"), calls, said("tool", ToolResult("b", "B")), said("tool", ToolResult("a", "A")))
    assert rendered.endswith(f"{USER}<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>{ASK}")


def test_reasoning_stays_while_tools_are_in_play():
    turns = [said("user", "Q"), said("assistant", Reasoning("Hm."), "A"), said("user", "P")]
    history = [said("user", "Q"), said("assistant", Reasoning("Hm."), "A", CALL), said("tool", ToolResult("c1", "R"))]
    assert "Hm." not in text(*turns)
    assert f"<think>Hm.{THINK_CLOSE}A" in text(*turns, tools=(ECHO,)) and "Hm." in text(*history, said("user", "P"))


@pytest.mark.parametrize("parts, expected", [
    ((Reasoning("R"), "A"), f"R{THINK_CLOSE}A"), ((Reasoning(" \n"), "A"), f"{THINK_CLOSE}A"),
    ((Reasoning("R"), Reasoning("S"), "A"), f"R\nS{THINK_CLOSE}A"), (("<think>R</think>A",), f"R{THINK_CLOSE}A"),
    (("R</think>A</think>B",), f"R{THINK_CLOSE}A</think>B"),
    ((Reasoning("R"), "a</think>b"), f"R{THINK_CLOSE}a</think>b")])
def test_reasoning_is_found_where_clients_keep_it(parts, expected):
    rendered = text(said("user", "Q"), said("assistant", *parts), said("user", "P"), tools=(ECHO,))
    assert f"Q{ASK}{expected}{EOS}" in rendered


def test_white_space_before_a_tool_block_is_the_separator_alone():
    answer = said("assistant", "I look.\u00a0\n\n ", CALL)
    rendered = text(said("user", "Q"), answer, said("tool", ToolResult("c1", "R")))
    assert "I look.\u00a0\n\n<｜DSML｜tool_calls>" in rendered


def test_tools_may_come_before_the_system_text():
    official = text(said("system", "S"), said("user", "Q"), tools=(ECHO,))
    first = text(said("system", "S"), said("user", "Q"), tools=(ECHO,), layout="tools-first")
    block = official.split("S\n\n", 1)[1].split(USER)[0]
    assert official.startswith(f"{BOS}S\n\n## Tools") and first == f"{BOS}{block}\n\nS{USER}Q{ASK}"


def test_banned_tools_stay_in_the_prompt():
    question = said("user", "Q")
    assert text(question, tools=(ECHO,), tools_banned=True) == text(question, tools=(ECHO,))


def test_a_deferred_tool_is_defined_where_a_result_refers_to_it():
    late = Tool("late", {"name": "late", "description": "中"}, deferred=True)
    turns = [said("user", "Q"), said("assistant", CALL)]
    result = said("tool", ToolResult("c1", ("Found:", ToolReference("late"), ToolReference("gone"))))
    rendered = text(*turns, result, tools=(ECHO, late))
    assert '<tool_result>Found:\n\n{"name": "late", "description": "中"}\n\ngone</tool_result>' in rendered
    assert text(*turns[:1], tools=(ECHO, late)) == text(*turns[:1], tools=(ECHO,))


def test_the_response_format_follows_the_system_text():
    rendered = text(said("user", "Q"), response_format={"type": "json_object"})
    assert rendered.startswith(f"{BOS}\n\n## Response Format:\n\n") and f'{{"type": "json_object"}}{USER}Q' in rendered


def test_a_begun_answer_is_continued_without_thinking():
    begun = prompt(said("user", "Q"), said("assistant", Reasoning("R"), "It is"), continue_final=True)
    assert rendered_text(begun.segments) == f"{BOS}{USER}Q{ASSISTANT}{THINK_CLOSE}It is" and not begun.thinking


def test_the_prompt_says_whether_the_answer_begins_with_reasoning():
    assert prompt(said("user", "Q")).thinking
    off = prompt(said("user", "Q"), thinking=False)
    assert not off.thinking and rendered_text(off.segments).endswith(ASSISTANT + THINK_CLOSE)


ANSWER = said("assistant", "A")
REFUSED = {
    "nothing": ([], "nothing to answer"), "only system": ([said("system", "S")], "nothing to answer"),
    "only an answer": ([ANSWER], "nothing to answer"),
    "answered": ([said("user", "Q"), ANSWER], "last message must be user or tool"),
    "answered, then system": ([said("user", "Q"), ANSWER, said("system", "S")], "last message must be user or tool"),
    "unknown role": ([said("critic", "Q")], "role is 'critic'"),
    "result in an answer": ([said("user", "Q"), said("assistant", ToolResult("a", "b"))], "cannot hold a ToolResult"),
    "call in a question": ([said("user", CALL)], "cannot hold a ToolCall")}


@pytest.mark.parametrize("messages, message", REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_answered_is_refused(messages, message):
    with pytest.raises(BadRequest, match=message) as refusal:
        prompt(*messages)
    assert refusal.value.status == 400 and refusal.value.param == "messages"


def test_an_answer_that_ends_with_calls_cannot_be_continued():
    with pytest.raises(BadRequest, match="cannot be continued"):
        prompt(said("user", "Q"), said("assistant", CALL), continue_final=True)


def test_a_schema_nested_without_end_is_refused():
    schema = {}
    for _ in range(5000):
        schema = {"a": schema}
    with pytest.raises(BadRequest, match="nested too deep"):
        prompt(said("user", "Q"), tools=(Tool("deep", schema),))


def conversation_quoting(quote):
    tool = Tool("t" + quote, {"name": "t" + quote, quote: [quote]})
    call = ToolCall("c1", "t" + quote, f'{{"{quote}": "{quote}", "n": ["{quote}"]}}')
    return Conversation((said("system", quote), said("user", quote), said("assistant", Reasoning(quote), quote, call),
                         said("tool", ToolResult("c1", quote)), said("system", quote)), tools=(tool,),
                        response_format={"x": quote})


def test_quoted_control_literals_add_no_control_token(v4_tokenizer):
    def controls(quote):
        segments = render(conversation_quoting(quote), effort_profile="0731").segments
        return [token for token in v4_tokenizer.encode(segments) if token in v4_tokenizer.control_ids]
    assert controls(" ".join(CONTROL_LITERALS)) == controls("plain")


def test_lone_surrogates_never_reach_the_tokenizer(v4_tokenizer):
    call = said("assistant", ToolCall("c", "n", '{"\\ud800": ["\\udfff"], "k": "\\ud83d"}'))
    segments = prompt(said("user", "\ud800"), call, said("user", "Q")).segments
    assert v4_tokenizer.decode(v4_tokenizer.encode(segments)).count("\ufffd") == 4


def test_ends_mark_what_each_message_said():
    turns = [said("system", "S"), said("user", "Q"), said("assistant", "A"), said("user", "P"), said("system", "late")]
    whole = prompt(*turns)
    upto = [rendered_text(whole.segments[:end]) for end in whole.ends]
    assert upto == [f"{BOS}S", f"{BOS}S{USER}Q", f"{BOS}S{USER}Q{ASSISTANT}{THINK_CLOSE}A{EOS}",
                    f"{BOS}S{USER}Q{ASSISTANT}{THINK_CLOSE}A{EOS}{USER}P",
                    f"{BOS}S{USER}Q{ASSISTANT}{THINK_CLOSE}A{EOS}{USER}P\n\nlate"]


def test_ends_of_sorted_results_hold_all_messages_so_far():
    calls = said("assistant", ToolCall("a", "x", "{}"), ToolCall("b", "y", "{}"))
    whole = prompt(said("user", "Q"), calls, said("tool", ToolResult("b", "B")), said("tool", ToolResult("a", "A")))
    assert rendered_text(whole.segments[:whole.ends[2]]).endswith("<tool_result>B</tool_result>")
    assert whole.ends[3] == whole.ends[2]
