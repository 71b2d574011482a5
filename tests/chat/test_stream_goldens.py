"""The published parser vectors, with their strings cut in every way."""
import json
from pathlib import Path

import pytest

from ds4mlx.chat.events import ReasoningEnd, Recovered, gather
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.text.segments import Control

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "parser.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=case["id"]) for case in GOLDEN["cases"]]


def tokens(piece) -> list[bytes | Control]:
    """A piece of a vector as tokens: a limit is the end of the answer, not a token."""
    if isinstance(piece, str):
        return [piece.encode()]
    if "b" in piece:
        return [bytes.fromhex(piece["b"])]
    return [Control(piece["c"])] if "c" in piece else []


def read(case, pieces):
    """Events of the whole answer, and the stream after it."""
    stream = AnswerStream(thinking=case["thinking"], tools=case["declared_tools"])
    events = []
    for token in pieces:
        if not stream.done:
            events += stream.push(token)
    return events + stream.finish("length" if {"limit": True} in case["pieces"] else "stop"), stream


def check(case, pieces):
    events, stream = read(case, pieces)
    answer, expected = gather(events), case["expect"]
    calls = [{"name": name, "arguments": json.loads(arguments)} for name, arguments in answer.calls]
    assert (answer.content, answer.reasoning, calls) == (
        expected["content"], expected["reasoning"], expected["tool_calls"])
    assert stream.finish_reason == expected["finish"]
    assert stream.reasoning_closed == expected.get("reasoning_closed", True)
    assert stream.implicit_close == expected.get("implicit_think_close", False)
    assert any(isinstance(event, Recovered) for event in events) == expected.get("recovered", False)
    assert "exact_block" not in expected or stream.exact_block == expected["exact_block"]
    assert [event.natural for event in events if isinstance(event, ReasoningEnd)] == (
        [stream.reasoning_closed] if case["thinking"] else [])


@pytest.mark.parametrize("case", CASES)
def test_a_vector_token_by_token(case):
    check(case, [token for piece in case["pieces"] for token in tokens(piece)])


@pytest.mark.parametrize("case", CASES)
def test_a_vector_byte_by_byte(case):
    whole = [token for piece in case["pieces"] for token in tokens(piece)]
    check(case, [part for token in whole
                 for part in ([bytes([byte]) for byte in token] if isinstance(token, bytes) else [token])])


@pytest.mark.parametrize("case", CASES)
def test_a_vector_with_each_string_cut_at_each_byte(case):
    whole = [token for piece in case["pieces"] for token in tokens(piece)]
    for at, token in enumerate(whole):
        for cut in range(1, len(token)) if isinstance(token, bytes) else ():
            check(case, [*whole[:at], token[:cut], token[cut:], *whole[at + 1:]])


@pytest.mark.parametrize("case", CASES)
def test_a_vector_with_neighbouring_strings_joined(case):
    joined: list[bytes | Control] = []
    for token in (token for piece in case["pieces"] for token in tokens(piece)):
        if joined and isinstance(token, bytes) and isinstance(joined[-1], bytes):
            joined[-1] += token
        else:
            joined.append(token)
    check(case, joined)


def test_the_region_follows_the_published_walk():
    stream = AnswerStream(thinking=False, tools=["write"])
    for piece, region in GOLDEN["regions"]["steps"]:
        for token in tokens(piece):
            stream.push(token)
        assert (piece, stream.region.value) == (piece, region)


def test_the_region_after_each_byte_ends_where_the_token_ends():
    stream = AnswerStream(thinking=False, tools=["write"])
    for piece, region in GOLDEN["regions"]["steps"]:
        for token in tokens(piece):
            for part in [bytes([byte]) for byte in token] if isinstance(token, bytes) else [token]:
                stream.push(part)
        assert (piece, stream.region.value) == (piece, region)
