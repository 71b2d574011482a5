"""Streams of POST /v1/completions against transcripts written by hand."""
import json
import re
from pathlib import Path

import pytest

GOLDENS = dict(re.findall(r"^=== (.*)\n((?:(?!===).*\n)*)",
                          (Path(__file__).parents[1] / "data" / "completions_sse.txt").read_text("utf-8"), re.M))
# name -> (the model's text, fields of the request)
CASES = {
    "text": ("Hello, 世界.", {}),
    "thinking": ("Let me see.</think>Done.", {"thinking": True}),
    "a call is text": ("<｜DSML｜tool_calls>", {}),   # no tools can be declared here
    "length": ("Hello", {"max_tokens": 3}),
    "stop string": ("one STOP two", {"stop": ["never", "STOP"]}),
}


def transcript(server, **fields):
    """A stream as the goldens are written: neighbouring pieces joined, because how it is cut depends on time."""
    body = {"prompt": "Hi", "thinking": False, "stream": True, "stream_options": {"include_usage": True}, **fields}
    frames = [frame for frame in server.post("/v1/completions", json=body).text.split("\n\n")
              if frame and not frame.startswith(":")]
    joined = []
    for chunk in (json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]):
        choice, last = _piece(chunk), _piece(joined[-1]) if joined else None
        kind = next((kind for kind in ("reasoning_content", "text") if choice and choice.get(kind)), None)
        if kind and last and last.get(kind) and ("reasoning_content" in last) == ("reasoning_content" in choice):
            last[kind] += choice[kind]
        else:
            joined.append(chunk)
    text = "".join(f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n" for chunk in joined)
    text = re.sub(r'"created":\d+', '"created":0', re.sub(r'"cmpl-[0-9a-f]{24}"', '"cmpl_ID"', text))
    return re.sub(r'"ds4mlx-\w+"', '"ds4mlx-stub"', text) + frames[-1] + "\n\n"


def _piece(chunk):
    return chunk["choices"][0] if chunk.get("choices") else None


@pytest.mark.parametrize("name", CASES)
def test_a_stream_is_the_transcript_written_by_hand(serve, name):
    answer, fields = CASES[name]
    assert transcript(serve(answer), **fields) == GOLDENS[name]


def test_a_failure_within_a_stream_is_the_transcript_written_by_hand(serve):
    server, steps = serve("Hello."), iter(range(100))

    def fail():
        if next(steps) == 3:
            raise ArithmeticError("logits are not finite")
    server.stub.before_decode = fail
    assert transcript(server) == GOLDENS["error"]
