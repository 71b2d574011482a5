"""The log of `ds4mlx serve --log-json`: an object a line, and no prompt in any of them."""
import json
import logging

import pytest

from ds4mlx.cli.serve_log import JsonLines


def line(name="ds4mlx.x", message="text", args=(), fault=None):
    exc_info = (type(fault), fault, fault.__traceback__) if fault else None
    return JsonLines().format(logging.LogRecord(name, logging.INFO, "x.py", 1, message, args, exc_info))


@pytest.fixture
def fault():
    try:
        raise ValueError("cannot read 'a secret'")
    except ValueError as raised:
        return raised


def test_a_record_is_one_line_with_when_what_and_who():
    text = line(message="two\nlines of %s", args=("中",))
    found = json.loads(text)
    assert "\n" not in text and found.pop("time").endswith("+00:00")
    assert found == {"level": "info", "logger": "ds4mlx.x", "message": "two\nlines of 中"}


def test_arguments_with_names_are_members():
    found = json.loads(line(message="gen=%(tokens)d", args=({"tokens": 7, "finish": "stop"},)))
    assert (found["message"], found["tokens"], found["finish"]) == ("gen=7", 7, "stop")


def test_of_an_exception_its_kind_and_place_are_told_but_not_its_text(fault):
    text = line(fault=fault)
    found = json.loads(text)
    assert found["exception"] == "ValueError" and found["where"][-1].endswith(" fault") and "secret" not in text


def test_of_a_librarys_message_the_first_line_is_told():
    message = "Task exception was never retrieved\nfuture: <Task exception=ValueError('a secret')>"
    assert json.loads(line("asyncio", message))["message"] == "Task exception was never retrieved"
