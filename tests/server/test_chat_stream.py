"""Streams of POST /v1/chat/completions against transcripts written by hand."""
import json
import re
from pathlib import Path

import pytest
from running_server import body

GOLDENS = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)",
                          (Path(__file__).parents[1] / "data" / "chat_sse.txt").read_text("utf-8"), re.M))
BASH = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {
    "command": {"type": "string"}, "timeout": {"type": "number"}}}}}]


def block(*calls):
    def invoke(**arguments):
        return "".join(f'<｜DSML｜parameter name="{name}" string="{text}">{value}</｜DSML｜parameter>\n'
                       for name, (text, value) in arguments.items())
    invokes = "".join(f'<｜DSML｜invoke name="bash">\n{invoke(**call)}</｜DSML｜invoke>\n' for call in calls)
    return f"\n\n<｜DSML｜tool_calls>\n{invokes}</｜DSML｜tool_calls>"


# name -> (the model's text, fields of the request)
CASES = {
    "text": ("Hello, 世界.", {"stream_options": {"include_usage": True}}),
    "thinking": ("Let me see.</think>Done.", {"thinking": True}),
    "tool": ("Look:" + block({"command": ("true", 'ls "a"'), "timeout": ("false", "5.0")}), {"tools": BASH}),
    "parallel tools": (block({"command": ("true", "one")}, {"command": ("true", "two")}), {"tools": BASH}),
    "length": ("Hello", {"max_tokens": 3}),
    "stop string": ("one STOP two", {"stop": ["never", "STOP"]}),
}
HEAD = '"id":"chatcmpl_ID","object":"chat.completion.chunk","created":0,"model":"deepseek-v4-flash"'


def transcript(server, **fields):
    """A stream as the goldens are written: neighbouring pieces joined, because how it is cut depends on time."""
    text = server.post(json=body(stream=True, **fields)).text
    chunks = []
    for frame in (frame for frame in text.split("\n\n") if frame.startswith("data: {")):
        chunk = json.loads(frame.removeprefix("data: "))
        if chunks and (piece := _piece(chunk)) and (last := _piece(chunks[-1])) and piece[:2] == last[:2]:
            last[2][piece[1]] += piece[2][piece[1]]
        else:
            chunks.append(chunk)
    joined = "".join(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in chunks)
    for told, shown in ((r'"created":\d+', '"created":0'), (r'"chatcmpl-[0-9a-f]{24}"', '"chatcmpl_ID"'),
                        (r'"call_[0-9a-f]{32}"', '"call_ID"'), (r'"ds4mlx-\w+"', '"ds4mlx-stub"')):
        joined = re.sub(told, shown, joined)
    return joined + text[text.rindex("data: "):]


def _piece(chunk):
    """(call, member, what holds it) of a piece of text, reasoning or arguments; None for any other chunk."""
    delta = chunk["choices"][0]["delta"] if chunk.get("choices") else {}
    if "tool_calls" in delta:
        call, = delta["tool_calls"]
        return None if "id" in call else (call["index"], "arguments", call["function"])
    member = next((member for member in ("content", "reasoning_content") if delta.get(member)), None)
    return member and (None, member, delta)


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_transcript_written_by_hand(serve, name):
    answer, fields = CASES[name]
    assert transcript(serve(answer), **fields) == GOLDENS[name].replace("HEAD", HEAD)


def test_a_failure_within_a_stream_is_the_transcript_written_by_hand(serve):
    server, steps = serve("Hello."), iter(range(100))

    def fail():
        if next(steps) == 3:
            raise ArithmeticError("logits are not finite")
    server.stub.before_decode = fail
    assert transcript(server) == GOLDENS["error"].replace("HEAD", HEAD)
