"""The low-level renderer against the published vectors and those that follow the published rules."""
import hashlib
import json
from pathlib import Path

import pytest

from ds4mlx.chat.dialects.deepseek_v4_turns import LowLevelMessage, render_low_level
from ds4mlx.chat.messages import ToolCall
from ds4mlx.errors import BadRequest
from ds4mlx.text.segments import rendered_text

CASES = json.loads((Path(__file__).parents[1] / "data" / "prompts.json").read_text())["cases"]


def low_level(raw):
    """A message of the vectors, its tools and calls without their wrappers."""
    calls = [ToolCall(call.get("id", ""), **call["function"]) for call in raw.get("tool_calls", [])]
    return LowLevelMessage(
        raw["role"], raw.get("content"), tuple(tool["function"] for tool in raw.get("tools", [])),
        raw.get("response_format"), raw.get("reasoning_content"), tuple(calls), raw.get("tool_call_id"),
        raw.get("task"), raw.get("wo_eos", False))


def rendered(case, count=None, **changes):
    """The prompt of the case's first `count` messages, its options changed."""
    options = dict(case["options"])
    options["effort"] = options.pop("reasoning_effort")
    return render_low_level([low_level(raw) for raw in case["messages"][:count]], **(options | changes))


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_prompt_is_the_expected_text(case):
    text = rendered_text(rendered(case).segments)
    assert text == case["expected"]
    assert hashlib.sha1(text.encode()).hexdigest() == case["expected_sha1"]


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_the_prompt_has_the_expected_ids(case, v4_tokenizer):
    ids = v4_tokenizer.encode(rendered(case).segments)
    assert (len(ids), ids[:6], ids[-6:]) == (case["n_tokens"], case["first_ids"], case["last_ids"])
    assert ids == v4_tokenizer.encode_marked(case["expected"])  # no vector quotes a control literal


@pytest.mark.parametrize("case", CASES, ids=[case["id"] for case in CASES])
def test_each_earlier_prompt_is_a_prefix_while_reasoning_is_kept(case, v4_tokenizer):
    whole = v4_tokenizer.encode(rendered(case, drop_thinking=False).segments)
    answers = [i for i, raw in enumerate(case["messages"]) if raw["role"] == "assistant"]
    for prompt in [v4_tokenizer.encode(rendered(case, i, drop_thinking=False).segments) for i in answers]:
        assert whole[:len(prompt)] == prompt


REFUSED = [([], "messages is empty"), ([LowLevelMessage("critic", "x")], "role is 'critic'"),
           ([LowLevelMessage("developer", "")], "developer message without content"),
           ([LowLevelMessage("user", "x", task="sing")], "task is 'sing'")]


@pytest.mark.parametrize("messages, message", REFUSED)
def test_what_the_encoder_cannot_take_is_refused(messages, message):
    with pytest.raises(BadRequest, match=message) as refusal:
        render_low_level(messages, "chat")
    assert refusal.value.param == "messages"


def test_all_vectors_are_here():
    assert len(CASES) == 32
