"""Tool calls in the prompt: canonical or replayed, they keep the prefix."""
import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.dialects.prompt import Replay
from ds4mlx.chat.messages import Conversation, Message, Reasoning, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.chat.syntax.dsml_writing import render_calls
from ds4mlx.text.segments import EOS, THINK_CLOSE, Control, Text

TOOLS = (Tool("echo", {"name": "echo"}),)
QUESTION = Message("user", (TextPart("Q"),))
CALL = ToolCall("c1", "echo", '{"text": "hi", "n": 1}')
RESULT = Message("tool", (ToolResult("c1", "R"),))


def prompt(*messages, replay=None):
    return render(Conversation(messages, tools=TOOLS), effort_profile="0731", replay=replay)


@pytest.mark.parametrize("content", ["I look.", "", "See below:\n\n"])
def test_the_next_turn_begins_with_this_turn_and_its_answer(content, v4_tokenizer):
    answer = Message("assistant", (Reasoning("Hm."), TextPart(content), CALL))
    sampled = [Text("Hm."), Control(THINK_CLOSE), Text(content.rstrip()), *render_calls([CALL]), Control(EOS)]
    before = [*prompt(QUESTION).segments, *sampled]
    after = v4_tokenizer.key_bytes(prompt(QUESTION, answer, RESULT).segments)
    assert after.startswith(v4_tokenizer.key_bytes(before))


@pytest.mark.parametrize("content, lead", [("Done.", ""), ("Done", "  \n"), ("Done", "\n"), ("", "")])
def test_an_exactly_replayed_block_keeps_the_sampled_ids(content, lead, v4_tokenizer):
    odd = [i for character in "tool_calls>" for i in v4_tokenizer.encode_literal(character)]
    ids = tuple([30, v4_tokenizer.control["｜DSML｜"], *odd])
    answer = Message("assistant", (Reasoning("Hm."), TextPart(content), CALL))
    replay = {1: Replay(lead, ids, v4_tokenizer.decode(ids))}
    sampled = v4_tokenizer.encode([*prompt(QUESTION).segments, Text("Hm."), Control(THINK_CLOSE), Text(content + lead)])
    after = v4_tokenizer.encode(prompt(QUESTION, answer, RESULT, replay=replay).segments)
    assert after[:len(sampled) + len(ids)] == [*sampled, *ids]
