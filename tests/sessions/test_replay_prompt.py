"""A replayed block makes the next prompt the tokens that the model computed, whatever the client made of its calls."""
import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.dialects.prompt import Replay
from ds4mlx.chat.events import gather
from ds4mlx.chat.messages import Conversation, Message, TextPart, Tool, ToolCall, ToolResult
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.sessions.replay import Call, ToolMemory, cut_block
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.segments import DSML, Control, Text

TOOLS = (Tool("Edit", {"name": "Edit", "parameters": {"properties": {"replace_all": {"default": False}}}}),)
SCHEMAS = {tool.name: tool.schema["parameters"] for tool in TOOLS}
QUESTION = Message("user", (TextPart("Q"),))
BLOCK = (f'<{DSML}tool_calls>\n<{DSML}invoke name="Edit">\n<{DSML}parameter name="new" string="true">a  \nb</{DSML}'
         f'parameter>\n<{DSML}parameter name="n" string="false">5000.0</{DSML}parameter>\n</{DSML}invoke>\n'
         f'</{DSML}tool_calls>')


def read(tokenizer, ids, lead=""):
    """What a client gets of an answer: the events of its tokens."""
    stream = AnswerStream(thinking=False, tools=["Edit"])
    events = stream.push(lead.encode())
    for token in ids:
        events += stream.push(piece(tokenizer, token))
    assert stream.exact_block
    return gather(events)


def piece(tokenizer, token):
    literal = tokenizer.literal(token)
    return tokenizer.token_bytes(token) if literal is None else Control(literal)


def sampled(tokenizer, answer):
    lead, ids = cut_block([(token, piece(tokenizer, token)) for token in answer])
    return ToolBlock(("toolu_1",), lead, tokenizer.decode(ids), ids)


def next_prompt(memory, tokenizer, content, arguments):
    """Ids of the following request, whose client sends `arguments` back."""
    found = memory.replays({1: [Call("toolu_1", "Edit", arguments)]}, SCHEMAS)
    replay = {i: Replay(block.lead, block.ids, block.text) for i, block in found.blocks.items()}
    answer = Message("assistant", (TextPart(content), ToolCall("toolu_1", "Edit", arguments)))
    messages = QUESTION, answer, Message("tool", (ToolResult("toolu_1", "R"),))
    prompt = render(Conversation(messages, TOOLS, thinking=False), effort_profile="0731", replay=replay)
    return tokenizer.encode(prompt.segments)


def first_prompt(tokenizer):
    segments = render(Conversation((QUESTION,), TOOLS, thinking=False), effort_profile="0731").segments
    return tokenizer.encode(segments)


RETURNED = {"as sent": '{"new":"a  \\nb","n":5000.0}',
            "as Claude Code sends it": '{"replace_all":false,"n":5000,"new":"a\\nb"}'}
SEPARATORS = ["Look.\n\n", "Look\n\n", "Look  \n\n", "Look.\n", "(Look)", "", "\n\n", "Look:\n \n\n"]


@pytest.mark.parametrize("text", SEPARATORS)
@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
def test_the_next_prompt_has_the_sampled_tokens(text, returned, v4_tokenizer):
    answer = v4_tokenizer.encode_marked(text + BLOCK)
    client, block = read(v4_tokenizer, answer), sampled(v4_tokenizer, answer)
    memory = ToolMemory()
    memory.remember(block, client.calls)
    live = [*first_prompt(v4_tokenizer), *answer, v4_tokenizer.eos]
    assert next_prompt(memory, v4_tokenizer, client.content, returned)[:len(live)] == live


@pytest.mark.parametrize("text", SEPARATORS)
def test_an_odd_spelling_still_gives_the_sampled_bytes(text, v4_tokenizer):
    answer = [token for character in text for token in v4_tokenizer.encode_literal(character)]
    answer += v4_tokenizer.encode_marked(BLOCK)
    client = read(v4_tokenizer, answer)
    memory = ToolMemory()
    memory.remember(sampled(v4_tokenizer, answer), client.calls)
    live = v4_tokenizer.key_bytes_of_ids([*first_prompt(v4_tokenizer), *answer, v4_tokenizer.eos])
    after = next_prompt(memory, v4_tokenizer, client.content, RETURNED["as sent"])
    assert v4_tokenizer.key_bytes_of_ids(after).startswith(live)


def test_an_edit_by_the_client_reaches_the_prompt(v4_tokenizer):
    answer = v4_tokenizer.encode_marked("Look.\n\n" + BLOCK)
    memory = ToolMemory()
    memory.remember(sampled(v4_tokenizer, answer), read(v4_tokenizer, answer).calls)
    after = v4_tokenizer.decode(next_prompt(memory, v4_tokenizer, "Look.", '{"new":"a  \\nc","n":5000}'))
    assert 'string="true">a  \nc<' in after and 'string="true">a  \nb<' not in after


@pytest.mark.parametrize("text", SEPARATORS)
def test_calls_of_a_saved_block_are_read_from_its_tokens(text, v4_tokenizer):
    quoted = BLOCK.replace("a  \nb", "it says </｜DSML｜parameter>, quoted")
    before, after = quoted.split("</｜DSML｜parameter>, quoted")
    closing = v4_tokenizer.encode([Text("</｜DSML｜parameter"), Text(">, quoted")])
    answer = [*v4_tokenizer.encode_marked(text + before), *closing, *v4_tokenizer.encode_marked(after)]
    block = sampled(v4_tokenizer, answer)
    assert read(v4_tokenizer, block.ids, block.lead).calls == read(v4_tokenizer, answer).calls
