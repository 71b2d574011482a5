"""Answers held to a format or to a call, whatever the model would rather say."""
import json
import random

import jsonschema
import pytest
from host import BYTES, Host, talk, user
from random_tools import random_tool

from ds4mlx.chat.messages import TextPart, Tool, ToolCall
from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import BadRequest

DEPTH = {"type": "object", "properties": {"depth": {"type": "integer", "minimum": 1, "maximum": 9}},
         "required": ["depth"], "additionalProperties": False}
LS = Tool("ls", {"name": "ls", "parameters": DEPTH}, strict=True)
RM = Tool("rm", {"name": "rm", "parameters": {"type": "object"}})
CALL = '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="ls">\n'
CALLED = '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {
    "type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["n"],
    "additionalProperties": False}}}


def babble(script, **stub):
    """An engine that says anything at all."""
    return StubEngine(lambda prompt: [None] * 20_000, **stub)


@pytest.fixture
def babbling(host):
    return host([""], engine=babble)


def calls(reply):
    return [(part.name, json.loads(part.arguments)) for part in reply.message.parts if isinstance(part, ToolCall)]


def text(reply):
    return "".join(part.text for part in reply.message.parts if isinstance(part, TextPart))


def test_a_forced_call_comes_though_the_model_would_rather_talk(host):
    forced = talk(user("Hi"), tools=(LS, RM), thinking=False, must_call=("ls",))
    reply = host(["I will not."]).ask(forced, one_call=True)
    (name, arguments), = calls(reply)
    assert (name, text(reply)) == ("ls", "") and 1 <= arguments["depth"] <= 9
    assert reply.end.reason == "tool_calls"


def test_what_is_called_is_left_to_the_model_where_any_tool_will_do(host):
    answer = f'{CALL.replace("ls", "rm")}<｜DSML｜parameter name="f" string="true">x{CALLED}'
    reply = host([answer]).ask(talk(user("Hi"), tools=(LS, RM), thinking=False, must_call=("ls", "rm")))
    assert calls(reply) == [("rm", {"f": "x"})]


def test_the_reasoning_before_a_forced_call_is_free_but_has_to_close(host):
    reply = host(["Well.<｜end▁of▁sentence｜> Hm.</think>No."]).ask(
        talk(user("Hi"), tools=(LS,), must_call=("ls",)), one_call=True)
    assert reply.message.parts[0].text.startswith("Well.") and [name for name, _ in calls(reply)] == ["ls"]


def test_a_strict_tool_is_held_to_its_schema_where_the_model_calls_it_by_itself(host):
    answer = f'Look:{CALL}<｜DSML｜parameter name="depth" string="true">deep{CALLED}'
    reply = host([answer]).ask(talk(user("Hi"), tools=(LS,), thinking=False), one_call=True)
    (_, arguments), = calls(reply)
    assert text(reply) == "Look:" and arguments["depth"] in range(1, 10)


@pytest.mark.parametrize("depth, called", [("3", [("ls", {"depth": 3})]), ("12", []), ('"3"', [])])
@pytest.mark.parametrize("answer", ["Hm.{0}", "Hm.</think>{1}"], ids=["in reasoning", "spelled without the mark"])
def test_a_strict_call_that_cannot_be_held_counts_if_it_keeps_to_its_schema(host, answer, depth, called):
    block = f'{CALL}<｜DSML｜parameter name="depth" string="false">{depth}{CALLED}'
    reply = host([answer.format(block, block.replace("｜DSML｜", ""))]).ask(talk(user("Hi"), tools=(LS,)))
    assert calls(reply) == called and ("depth" in repr(reply.message.parts[:2])) is (not called)


def test_a_call_of_a_tool_that_is_not_strict_counts_as_ever_beside_one_that_is(host):
    block = CALL.replace('"ls"', '"rm"') + f'<｜DSML｜parameter name="depth" string="false">99{CALLED}'
    assert calls(host(["Hm." + block]).ask(talk(user("Hi"), tools=(LS, RM)))) == [("rm", {"depth": 99})]


def test_text_without_a_call_stays_free_beside_strict_tools(host):
    assert text(host(["Hello < all."]).ask(talk(user("Hi"), tools=(LS,), thinking=False))) == "Hello < all."


def test_a_response_format_holds_the_text_and_not_the_reasoning(host):
    reply = host(["I think so.</think>Sure: 5"]).ask(talk(user("Hi"), response_format=NUMBER))
    assert reply.message.parts[0].text == "I think so." and json.loads(text(reply))["n"] in range(100)
    assert reply.end.reason == "stop"


def test_an_answer_that_keeps_to_its_format_comes_as_the_model_says_it(host):
    answer = '{\n  "n": [1, {"x": "a < b"}]\n}'
    assert text(host([answer]).ask(talk(user("Hi"), thinking=False, response_format={"type": "json_object"}))) == answer


def test_with_tools_an_answer_of_a_format_may_be_a_call_instead(host):
    answer = f'{CALL}<｜DSML｜parameter name="depth" string="false">3{CALLED}'
    reply = host([answer]).ask(talk(user("Hi"), tools=(LS,), thinking=False, response_format=NUMBER))
    assert calls(reply) == [("ls", {"depth": 3})]


@pytest.mark.parametrize("seed", range(20))
def test_any_answer_satisfies_the_schema_of_its_format(babbling, seed):
    schema = random_tool(random.Random(seed)).schema["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    reply = babbling.ask(talk(user(str(seed)), thinking=False, response_format=form))
    jsonschema.validate(json.loads(text(reply)), schema)


def check_calls(host, seeds):
    for seed in seeds:
        tool = random_tool(random.Random(seed))
        reply = host.ask(talk(user(str(seed)), tools=(tool,), thinking=False, must_call=("run",)), one_call=True)
        (name, arguments), = calls(reply)
        jsonschema.validate(arguments, tool.schema["parameters"])
        assert name == "run"


@pytest.mark.parametrize("part", range(10))
def test_every_forced_call_parses_and_satisfies_its_schema(babbling, part):
    check_calls(babbling, range(20 * part, 20 * part + 20))


@pytest.mark.sweep
def test_a_thousand_more_forced_calls_satisfy_their_schemas(babbling):
    check_calls(babbling, range(1000, 2000))


def test_a_schema_that_cannot_be_kept_is_refused_before_there_is_an_answer(host):
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"enum": []}}}
    with pytest.raises(BadRequest, match="^response_format: "):
        host(["x"]).ask(talk(user("Hi"), response_format=form))
