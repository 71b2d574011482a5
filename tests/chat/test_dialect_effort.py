"""Reasoning effort: its two texts, its names, and the context that max needs."""
import hashlib

import pytest

from ds4mlx.chat.dialects.deepseek_v4 import gate_effort, parse_effort, render
from ds4mlx.chat.dialects.deepseek_v4_templates import EFFORT_TEXT
from ds4mlx.chat.messages import Conversation, Message, TextPart
from ds4mlx.errors import BadRequest

PUBLISHED = {  # sha256, bytes, tokens
    "preview": {"max": ("f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7", 476, 79)},
    "0731": {"high": ("f7a24f3b3050d4a83781e9b755b316aae2ec1d9dc87562541d90bcb04d7350f7", 476, 79),
             "max": ("53fb31b8392ec5b4a926481943efc67636748f137c1a49d493a7af4d4fa55d2c", 528, 92)}}
LEVELS = [(profile, effort) for profile in ("preview", "0731") for effort in ("low", "high", "max")]


@pytest.mark.parametrize("profile, effort", LEVELS)
def test_the_texts_are_the_published_ones(profile, effort, v4_tokenizer):
    empty = (hashlib.sha256(b"").hexdigest(), 0, 0)
    text = EFFORT_TEXT[profile][effort]
    measured = (hashlib.sha256(text.encode()).hexdigest(), len(text.encode()), len(v4_tokenizer.encode_literal(text)))
    assert measured == PUBLISHED[profile].get(effort, empty)


@pytest.mark.parametrize("profile, effort", LEVELS)
def test_effort_adds_its_tokens_while_thinking_and_none_otherwise(profile, effort, v4_tokenizer):
    def tokens(effort, thinking):
        question = Conversation((Message("user", (TextPart("Q"),)),), effort=effort, thinking=thinking)
        return len(v4_tokenizer.encode(render(question, effort_profile=profile).segments))
    added = PUBLISHED[profile].get(effort, ("", 0, 0))[2]
    assert tokens(effort, True) - tokens(None, True) == added
    assert tokens(effort, False) == tokens(None, False)


def test_a_request_without_effort_gets_the_servers():
    question = Conversation((Message("user", (TextPart("Q"),)),))
    segments = render(question, effort_profile="0731", default_effort="max").segments
    assert segments[1].text == EFFORT_TEXT["0731"]["max"]


@pytest.mark.parametrize("value, level", [
    ("none", "off"), ("off", "off"), ("minimal", "low"), ("low", "low"), ("medium", "low"), ("high", "high"),
    ("xhigh", "high"), ("max", "max"), (1, "low"), ("33", "low"), (34, "high"), (66.5, "high"), ("89", "high"),
    (90, "max"), ("100", "max")])
def test_effort_names_and_percentages_become_levels(value, level):
    assert parse_effort(value, "0731") == parse_effort(value, "preview") == level


def test_the_default_level_depends_on_the_checkpoint():
    assert (parse_effort(None, "0731"), parse_effort(None, "preview")) == ("low", "high")
    assert parse_effort(None, "preview", default="max") == "max"


@pytest.mark.parametrize("value", ["", "lots", "0", 0, 101, -5, "nan", float("nan"), 10**400, True, ["max"]])
def test_other_efforts_are_refused(value):
    with pytest.raises(BadRequest, match="reasoning effort is") as refusal:
        parse_effort(value, "0731")
    assert refusal.value.param == "reasoning_effort"


@pytest.mark.parametrize("effort, profile, ctx, min_ctx, allowed", [
    ("max", "preview", 393215, None, "high"), ("max", "preview", 393216, None, "max"),
    ("max", "0731", 1024, None, "max"), ("max", "preview", 1024, 0, "max"), ("max", "0731", 1024, 2048, "high"),
    ("low", "preview", 1024, None, "low")])
def test_max_needs_a_context_large_enough(effort, profile, ctx, min_ctx, allowed):
    assert gate_effort(effort, profile, ctx, min_ctx) == allowed
