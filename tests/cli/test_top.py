"""`ds4mlx top`, beside a real server over the scripted engine."""
import json
import os
import sys
import threading

import pexpect
import pytest
from fake_download_server import serving
from running_server import start, stop

from ds4mlx.cli.top_numbers import Reading, Slot, read
from ds4mlx.text.segments import CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """The control tokens, BOS 0 and EOS 1, then the 256 bytes."""
    return Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")


@pytest.fixture
def serve(tokenizer):
    """serve(text, **options of start): a server that answers with it; stopped after the test."""
    servers = []

    def run(answer="Hello.", **options):
        ids = tokenizer.encode_marked(answer)
        servers.append(start(tokenizer, lambda prompt: ids, **options))
        return servers[-1]
    yield run
    for server in servers:
        stop(server)


def test_one_look_shows_slots_requests_and_what_was_reused(serve, ds4mlx):
    server = serve(settings={"batched_session": 2})
    server.chat("Hi " * 100)
    server.chat("Hi " * 100)
    result = ds4mlx("top", server.url, "--once", "--interval", "0.1")
    assert result.code == 0 and result.err == "" and f"{server.url}: ok" in result.out
    assert "0 active, 0 waiting, 2 done, 0 refused" in result.out and "of their tokens reused" in result.out
    assert result.out.count("idle") == 2


def test_json_is_one_object(serve, ds4mlx):
    server = serve()
    server.chat()
    now = json.loads(ds4mlx("top", server.url, "--json", "--interval", "0.1").out)
    assert (now["status"], now["requests"], now["generated"], now["slots"][0]["phase"]) == ("ok", 1, 6, "idle")


def test_the_speed_of_a_slot_is_that_of_the_time_between_two_looks(serve):
    server = serve("long " * 150, step_s=0.002)
    asking = threading.Thread(target=server.chat)
    asking.start()
    before = read(server.url, None)
    while not (before.slots[0].phase == "decoding" and before.slots[0].tokens):
        before = read(server.url, None)
    now = read(server.url, None, before)
    while now.slots[0].tokens == before.slots[0].tokens:    # a look may be quicker than a step
        now = read(server.url, None, before)
    (slot,) = now.slots
    assert slot.phase == "decoding"
    assert slot.tps == (slot.tokens - before.slots[0].tokens) / (now.at - before.at) == now.tps("decoding")
    asking.join(60)


def reading(**numbers):
    """A server that has done nothing but what `numbers` say."""
    nothing = {"at": 0.0, "status": "ok", "uptime_s": 1.0, "context": 100, "active": 0, "queued": 0, "slots": (),
               "requests": 0, "errors": 0, "generated": 0, "sources": {}, "prompt_tokens": {}, "last_prefill_tps": 0.0,
               "last_decode_tps": 0.0, "first_token": (), "memory_bytes": 0, "disk_bytes": None, "disk_budget_bytes": 0}
    return Reading(**nothing | numbers)


def test_the_share_that_was_reused_counts_tokens():
    assert reading().reused_share is None
    assert reading(prompt_tokens={"prefill": 25, "live": 50, "disk": 25}).reused_share == 0.75


def test_the_first_token_came_within_the_bound_that_most_answers_keep():
    now = reading(first_token=((0.1, 4), (0.3, 8), (1.0, 9), (3.0, 10)))
    assert (now.first_token_s(0.5), now.first_token_s(0.9), now.first_token_s(1)) == (0.3, 1.0, 3.0)
    assert reading(first_token=((0.1, 0),)).first_token_s(0.5) is None


def test_slots_of_one_phase_add_up():
    now = reading(slots=(Slot(0, "decoding", 5, 10.0), Slot(1, "decoding", 5, 20.5), Slot(2, "prefilling", 5, 900.0)))
    assert (now.tps("decoding"), now.tps("prefilling"), now.tps("idle")) == (30.5, 900.0, 0)


def test_a_server_that_is_not_there_is_one_line(ds4mlx, serve):
    server = serve()
    url = server.url
    with serving({}) as other:
        result = ds4mlx("top", other.url)
        assert result.code == 1 and "404" in result.err and len(result.err.splitlines()) == 1
    result = ds4mlx("top", other.url)
    assert result.code == 1 and "is ds4mlx serve running there?" in result.err and result.out == "" and url != other.url


def test_a_page_that_is_no_statistics_is_one_line(ds4mlx):
    with serving({"stats": b"<html>", "metrics": b""}) as other:
        result = ds4mlx("top", other.url)
    assert result.code == 1 and "does not answer as ds4mlx serve does" in result.err


def test_a_key_is_needed_where_the_server_has_one(serve, ds4mlx):
    server = serve(settings={"api_key": "secret"})
    without = ds4mlx("top", server.url, "--once")
    assert without.code == 1 and "give --api-key" in without.err
    assert ds4mlx("top", server.url, "--once", "--interval", "0.1", "--api-key", "secret").code == 0


@pytest.mark.parametrize("arguments, told", [(["localhost:8000"], "URL is 'localhost:8000'"), (["--interval", "0"],
                         "--interval"), (["--interval", "x"], "--interval"), (["a", "b"], "b")])
def test_misuse_exits_2(ds4mlx, arguments, told):
    result = ds4mlx("top", *arguments)
    assert result.code == 2 and result.out == "" and told in result.err.splitlines()[0]


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")
def test_on_a_terminal_the_picture_changes_until_ctrl_c(serve):
    server = serve()
    child = pexpect.spawn(sys.executable, ["-W", "error", "-m", "ds4mlx", "top", server.url, "--interval", "0.1"],
                          timeout=60, dimensions=(30, 100), encoding="utf-8", env=os.environ | {"TERM": "xterm"})
    child.expect_exact("0 done")
    server.chat()
    child.expect_exact("1 done")
    child.send("\x03")
    child.expect(pexpect.EOF)
    child.close()
    assert child.exitstatus == 0


@pytest.mark.filterwarnings("ignore:.*forkpty:DeprecationWarning")
def test_a_server_that_goes_away_is_told_of_and_waited_for(tokenizer):
    server = start(tokenizer, lambda prompt: [1])
    try:
        child = pexpect.spawn(sys.executable, ["-m", "ds4mlx", "top", server.url, "--interval", "0.1"], timeout=60,
                              dimensions=(30, 160), encoding="utf-8", env=os.environ | {"TERM": "xterm"})
        child.expect_exact("0 done")
    finally:
        stop(server)
    child.expect_exact("is ds4mlx serve running there?")
    child.expect_exact("s old")
    child.close(force=True)
