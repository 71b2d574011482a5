"""What a trace tells of requests, in both formats; and that logs tell nothing of what was said."""
import json
import logging
import re

import pytest
from host import BYTES, system, talk, user

from ds4mlx.chat.events import Finish, Usage
from ds4mlx.chat.messages import Message, Tool, ToolResult
from ds4mlx.service.metrics import Timings
from ds4mlx.service.trace import Trace
from ds4mlx.service.trace_records import Asked
from ds4mlx.service.turn import Received
from ds4mlx.sessions.replay import Replays

CALL = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n<｜DSML｜parameter name="command" string="true">ls'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
SYSTEM = system("You help with long things. " * 60)
BASH = (Tool("bash", "", {"type": "object", "properties": {"command": {"type": "string"}}}),)


@pytest.fixture
def traced(host, tmp_path):
    """traced(answers, format=, **settings): a Host with a trace at `.file`."""
    def start(answers, format="jsonl", **settings):
        running = host(answers, **settings)
        running.file = tmp_path / "trace"
        running.service.trace = Trace(running.file, format)
        return running

    return start


def records(running, type=None):
    found = [json.loads(line) for line in running.file.read_text("utf-8").split("\n") if line]
    return [record for record in found if type in (None, record["type"])]


def test_each_record_is_a_line_with_its_type_and_its_request(traced):
    running = traced(["plan</think>Done."])
    running.ask(talk(user("Hi")))
    running.ask(talk(user("Ho")))
    found = records(running)
    assert {r["request"] for r in found} == {1, 2} and found[0].keys() >= {"type", "request", "time"}
    types = [r["type"] for r in found if r["request"] == 1]
    assert types == ["request", "cache", *["token"] * 11, "finish"]   # plan, the end of thinking, Done., EOS


def test_what_was_asked_is_there_in_full(traced):
    running = traced(["x</think>y"])
    body = b'{"temperature":1e0,  "messages":[]}'
    running.ask(talk(SYSTEM, user("Hi"), tools=BASH), request_id="req_1", max_tokens=9,
                received=Received("some-name", True, body))
    asked, = records(running, "request")
    assert asked["raw"] == body.decode() and asked["prompt"].endswith("<｜User｜>Hi<｜Assistant｜><think>")
    assert (asked["id"], asked["model"], asked["stream"], asked["tools"], asked["max_tokens"]) == (
        "req_1", "some-name", True, 1, 9)


def test_what_was_answered_is_there_token_by_token_and_parsed(traced):
    running = traced(["plan</think>Look.\n\n" + CALL])
    running.ask(talk(user("Hi"), tools=BASH))
    text = "".join(record["text"] for record in records(running, "token"))
    assert text.startswith("plan</think>Look.") and "｜DSML｜" in text
    end, = records(running, "finish")
    assert (end["finish"], end["reasoning"], end["content"]) == ("tool_calls", "plan", "Look.")
    call, = end["tool_calls"]
    assert call["id"].startswith("call_") and json.loads(call["arguments"]) == {"command": "ls"}


def test_a_tool_block_is_an_event_when_it_opens_and_when_it_closes(traced):
    running = traced(["plan</think>Look.\n\n" + CALL])
    running.ask(talk(user("Hi"), tools=BASH))
    assert [r["event"] for r in records(running, "event")] == ["tool block entered", "tool block closed"]


def test_saves_are_events(traced, tmp_path):
    running = traced(["plan</think>Done."], kv_disk_dir=tmp_path / "kv")
    running.ask(talk(SYSTEM, user("Hi")))
    event, = records(running, "event")
    assert re.fullmatch(r"stored checkpoint reason=cold tokens=\d+", event["event"])


def test_a_cold_start_and_going_on_are_told_apart(traced):
    running = traced(["plan</think>Done."])
    first = running.ask(talk(SYSTEM, user("Hi")))
    second = running.ask(talk(SYSTEM, user("Hi"), first.message, user("More")))
    cold, warm = records(running, "cache")
    assert (cold["cache_source"], cold["memory_miss_reason"]) == ("none", "no-live-checkpoint")
    assert cold["first_mismatch"] == [] and cold["because"].startswith("no state is live")
    assert (warm["cache_source"], warm["cached_tokens"]) == ("thinking-visible", second.reused)
    assert warm["cached_tokens"] == warm["live_tokens_before"] == first.state and warm["because"] == ""
    assert ["memory-token", "ids-differ"] in warm["verdicts"]   # the reasoning of an earlier turn is not sent


def test_the_first_mismatch_is_shown_with_its_surroundings_as_they_were_before(traced):
    running = traced(["plan</think>Done."])
    before = running.ask(talk(SYSTEM, user("one way")))
    running.ask(talk(SYSTEM, user("the other way")))
    _, told = records(running, "cache")
    assert told["live_tokens_before"] == before.state and told["cache_source"] == "memory-rewind"
    rows, at = told["first_mismatch"], told["live_prompt_common"]
    assert [row["position"] for row in rows] == list(range(at - 8, at + 9))
    assert rows[7]["live"] == rows[7]["prompt"] and rows[7]["live"]["piece"] == "<｜User｜>"
    assert (rows[8]["live"]["piece"], rows[8]["prompt"]["piece"]) == ("o", "t")
    assert told["first_difference"] == {"block": "messages[1]", "byte": len("<｜User｜>".encode()), "beside": "live"}


def test_a_state_from_disk_names_its_file(traced, tmp_path):
    running = traced(["plan</think>Done."], kv_disk_dir=tmp_path / "kv")
    first = running.ask(talk(SYSTEM, user("Hi")))
    running.restart()
    running.service.trace = Trace(running.file, "jsonl")
    reply = running.ask(talk(SYSTEM, user("Hi"), first.message, user("More")))
    told, = records(running, "cache")
    assert (told["cache_source"], told["disk_cached_tokens"]) == ("disk-text", reply.reused)
    assert (tmp_path / "kv" / told["disk_cache_file"]).exists()


def test_a_state_that_may_not_be_used_is_named_with_the_reason(traced, tmp_path):
    running = traced(["plan</think>Done."], kv_disk_dir=tmp_path / "kv")
    running.ask(talk(SYSTEM, user("Hi")))
    running.settings = running.settings.__class__(ctx=8192, kv_disk_dir=tmp_path / "kv")
    running.restart()
    running.service.trace = Trace(running.file, "jsonl")
    running.ask(talk(SYSTEM, user("Hi")))
    told, = records(running, "cache")
    assert told["cache_source"] == "none" and all("the limit here is 8192" in why for why in told["rejected"].values())
    assert told["rejected"]


def test_replayed_calls_are_counted(traced):
    running = traced(["plan</think>Look.\n\n" + CALL, "x</think>Fine."])
    first = running.ask(talk(user("Hi"), tools=BASH))
    running.ask(talk(user("Hi"), first.message, user("And?"), tools=BASH))
    assert records(running, "cache")[1]["tool_replay"] == {"mem": 1, "disk": 0, "canonical": 0, "missing_ids": 0}


def test_a_client_that_leaves_is_told(traced):
    running = traced(["plan</think>" + "x" * 4000])
    running.ask(talk(user("Hi")), disconnect_after=3)
    assert [r["event"] for r in records(running, "event")] == ["cancelled"]
    assert records(running, "finish")[0]["finish"] == "cancelled"


def test_half_characters_and_lone_surrogates_are_written_as_json(traced):
    running = traced(["x</think>é中"])
    running.ask(talk(user("Hi")), received=Received("", False, b"\xff\xed\xa0\x80"))
    assert [r["text"] for r in records(running, "token")][-6:-1] == ["\\xc3", "\\xa9", "\\xe4", "\\xb8", "\\xad"]
    assert records(running, "finish")[0]["content"] == "é中"


def test_text_for_people_has_the_parts_in_order(traced):
    running = traced(["plan</think>Look.\n\n" + CALL], "text")
    running.ask(talk(SYSTEM, user("Hi"), tools=BASH), received=Received("", False, b'{"messages": []}'))
    running.ask(talk(SYSTEM, user("Ho"), tools=BASH), received=Received("", False, b'{"messages": [1]}'))
    text = running.file.read_text("utf-8")
    parts = ["===== request 2 ", "kind: chat  api: chat  ", "think_mode: ", "--- cache decision ---\nslot: 0\n",
             "memory_miss_reason: token-mismatch", "tool_replay: mem=0 disk=0 canonical=0 missing_ids=0",
             "cache_source: memory-rewind", "first_difference: messages[1] byte ", "--- first mismatch ---\n",
             '--- raw request json ---\n{"messages": [1]}\n', "--- rendered prompt ---\n",
             "--- generated text ---\nplan", "\n--- trace: tool block entered ---\n",
             "--- parsed message ---\nfinish: tool_calls", "tool_call[0]: id: call_", "===== end request 2 =====\n\n"]
    places = [text.find(part, text.find(parts[0])) for part in parts]
    assert places == sorted(places) and places[0] > text.find("===== end request 1 =====") > 0 and text.endswith("\n\n")


def test_the_mismatch_table_marks_where_they_part(traced):
    running = traced(["plan</think>Done."], "text")
    for question in ("one way", "the other way"):
        running.ask(talk(SYSTEM, user(question)))
    table = running.file.read_text("utf-8").partition("--- first mismatch ---\n")[2].split("\n---")[0].splitlines()
    assert len(table) == 17 and [line[9] for line in table[:9]] == [" "] * 8 + ["*"]
    assert re.fullmatch(r" +\d+ \* +\d+ o +\d+ t", table[8])


@pytest.mark.parametrize("format", ["text", "jsonl"])
def test_a_request_that_never_ran_is_told_too(tmp_path, format):
    asked = Asked(0.0, "req_1", "chat", "chat", "m", False, 0, "off", 3, 9, 1.0, 0, 1.0, 0.05, 7, "{}", "Hi")
    account = Trace(tmp_path / "trace", format).request(BYTES, Replays(), lambda: asked)
    account.finishes(Finish("cancelled", Usage(3, 0, 0, 0)), [], Timings())
    text = (tmp_path / "trace").read_text("utf-8")
    assert text.index("req_1") < text.index("cancelled") and text.endswith(
        "===== end request 1 =====\n\n" if format == "text" else "}\n")


@pytest.mark.parametrize("traces", [False, True])
def test_no_log_tells_what_was_said(traced, host, traces, caplog, tmp_path):
    caplog.set_level(logging.DEBUG)
    answers = ["tangerine</think>marzipan\n\n" + CALL.replace("ls", "rhubarb"), "x</think>marzipan"]
    running = (traced if traces else host)(answers, kv_disk_dir=tmp_path / "kv")
    first = running.ask(talk(system("cinnamon " * 300), user("saffron"), tools=BASH))
    running.ask(talk(system("cinnamon " * 300), user("saffron!"), first.message, user("nutmeg"), tools=BASH))
    logged = "\n".join(record.getMessage() for record in caplog.records)
    assert "src=" in logged and not re.search("tangerine|marzipan|rhubarb|cinnamon|saffron|nutmeg", logged)
    assert not traces or "marzipan" in json.dumps([r["content"] for r in records(running, "finish")])


def test_a_request_whose_state_is_gone_is_told_of_with_what_was_tried(traced):
    running = traced(["plan</think>Done."])
    running.ask(talk(user("Hi")))
    reply = running.ask(talk(Message("tool", (ToolResult("call_0", "a b"),))), api="responses")
    assert reply.end.error_code == "continuation_state_unavailable"
    told = records(running, "cache")[1]
    assert told["cache_source"] == "none" and "the state they belong to is gone" in told["because"]
    assert [outcome for _, outcome in told["verdicts"]] == ["no-key", "other-calls"]
