"""Whatever an agent and its client say, each request's prompt begins with the prompt before it."""
from hypothesis import given
from hypothesis import strategies as st

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.text.segments import CONTROL_LITERALS, rendered_text

TOOLS = (Tool("echo", {"name": "echo"}),)
WORDS = st.lists(st.sampled_from(["a", " ", "\n\n", "中", "{}", *CONTROL_LITERALS]), max_size=4).map("".join)
TEXTS = WORDS.map(TextPart)
CALLS = st.builds(ToolCall, st.sampled_from("xyz"), WORDS, st.sampled_from(["{}", '{"a": 1}', "broken"]))
RESULTS = st.builds(ToolResult, st.sampled_from("xyz?"), WORDS)
LATE = st.lists(st.builds(Message, st.just("system"), st.tuples(TEXTS)), max_size=2)
PARTS = st.lists(RESULTS | TEXTS, min_size=1, max_size=4).map(tuple)
QUESTION = st.builds(Message, st.sampled_from(["user", "tool"]), PARTS)
ANSWER = st.builds(Message, st.just("assistant"), st.tuples(WORDS.map(Reasoning), TEXTS, CALLS) | st.tuples(TEXTS))
ROUND = st.tuples(st.lists(QUESTION, min_size=1, max_size=2), LATE, ANSWER)


@given(system=LATE, rounds=st.lists(ROUND, min_size=2, max_size=4), thinking=st.booleans(),
       layout=st.sampled_from(["official", "tools-first"]))
def test_a_prompt_is_a_prefix_of_the_next(system, rounds, thinking, layout):
    messages, earlier = list(system), ""
    for question, late, answer in rounds:
        messages += question + late
        conversation = Conversation(tuple(messages), tools=TOOLS, thinking=thinking)
        prompt = render(conversation, effort_profile="0731", layout=layout)
        text = rendered_text(prompt.segments)
        assert text.startswith(earlier) and len(prompt.ends) == len(messages)
        assert list(prompt.ends) == sorted(prompt.ends)
        messages, earlier = [*messages, answer], text
