"""`ds.connect`: a session on a real server, over the scripted engine."""
import socket
import threading

import pytest
from cuttable import Line
from running_server import start, stop

import ds4mlx as ds
from ds4mlx.chat.events import Finish
from ds4mlx.errors import BadRequest, Ds4Error
from ds4mlx.text.segments import BOS, CONTROL_LITERALS
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer

BYTES = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")
CALL = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">sea'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {
    "at": {"type": "string"}}}}}


@pytest.fixture
def serve():
    """serve(answer, settings): `ds.connect` of a server."""
    servers = []

    def serving(answer, *, step_s=0.0, **settings):
        ids = BYTES.encode_marked(answer)
        servers.append(start(BYTES, lambda prompt: ids, settings={"diagnostics": True, **settings},
                             step_s=step_s))
        return ds.connect(servers[-1].url, settings.get("api_key"))

    yield serving
    for server in servers:
        stop(server)


def test_an_answer_comes_in_pieces(serve):
    session = serve("The river.").session()
    answer = session.chat("What?", thinking=False)
    assert "".join(answer) == "The river." == answer.text
    assert answer.finish.reason == "stop" and answer.finish.usage.completion_tokens == 10


def test_reasoning_and_calls_are_apart(serve):
    answer = serve(f"Hm.</think>\n\n{CALL}").session().chat("Look!", tools=[LOOK], thinking=True).wait()
    assert answer.reasoning == "Hm." and answer.calls == (("look", '{"at":"sea"}'),)
    assert answer.finish.reason == "tool_calls" and answer.call_ids[0].startswith("call_")


def test_the_next_question_comes_behind_the_first_answer(serve):
    session = serve("Yes.").session()
    session.chat("One?", thinking=False).wait()
    session.chat("Two?").wait()
    session.close()
    assert [message["content"] for message in session.messages] == ["One?", "Yes.", "Two?", "Yes."]
    assert session.text.count("Yes.") == 2


def test_a_whole_answer_is_among_the_messages_at_once(serve):
    session = serve("The river.").session()
    answer = session.chat("What?", thinking=False)
    assert repr(answer) == "<Answer '', more to come: iterate over it, or wait()>"
    assert repr(answer.wait()) == "<Answer 'The river.', stop>"
    assert [message["content"] for message in session.messages] == ["What?", "The river."]
    assert repr(session).startswith("<RemoteSession of 2 messages, on http://127.0.0.1:")


def test_what_is_no_json_is_not_sent(serve):
    with pytest.raises(BadRequest, match="builtin_function_or_method is not JSON"):
        serve("The river.").session().chat("What?", tools=[len]).wait()


def test_a_broken_off_answer_ends_on_the_server_too(serve):
    session = serve("a" * 3000).session()
    answer = session.chat("Go on", thinking=False)
    first = next(iter(answer))
    session.close()
    assert session.messages[-1]["content"].startswith(first) and list(answer) == []
    assert len(session.messages[-1]["content"]) < 3000


def test_tokens_are_those_that_the_model_s_renderer_makes(serve):
    server = serve("Yes.")
    session = server.session()
    session.chat("One?", thinking=False).wait()
    rendered = server.render([{"role": "user", "content": "One?"}], thinking=False)
    assert session.tokens[:len(rendered.tokens)] == rendered.tokens
    assert session.text.startswith(rendered.text)


def test_complete_goes_on_from_what_is_there(serve):
    session = serve(" runs").session()
    session.complete("The river").wait()
    assert session.complete(" and").wait().text == " runs" and session.text == BOS + "The river runs and runs"


def test_rewind_and_fork(serve):
    session = serve("Yes.").session()
    session.chat("One?", thinking=False).wait()
    kept = session.tokens
    fork = session.fork()
    fork.chat("Two?").wait()
    fork.rewind(len(kept))
    assert fork.tokens == kept == session.tokens and fork.messages == session.messages
    fork.rewind(4)
    assert fork.tokens == kept[:4] and fork.messages == []


def test_what_was_said_can_be_saved(serve, tmp_path):
    server = serve("Yes.")
    session, other = server.session(), server.session()
    session.chat("One?", thinking=False).wait()
    session.save(tmp_path / "talk")
    other.load(tmp_path / "talk")
    assert other.messages == session.messages and other.tokens == session.tokens


def test_what_the_server_refuses_is_said_in_its_words(serve):
    with pytest.raises(BadRequest, match="temperature"):
        serve("Yes.").session().chat("Hi", sampling=ds.Sampling(temperature=9)).wait()


def test_what_an_answer_is_held_to_reaches_the_server(serve):
    session = serve("Yes.").session()
    with pytest.raises(BadRequest, match="tool_choice"):
        session.chat("Look!", tool_choice={"type": "function", "function": {"name": "absent"}}).wait()
    with pytest.raises(BadRequest, match="response_format"):
        session.chat("Look!", response_format={"type": "xml"}).wait()


def test_a_key_is_sent_and_a_wrong_one_refused(serve):
    server = serve("Yes.", api_key="secret")
    assert server.session().chat("Hi", thinking=False).wait().text == "Yes."
    with pytest.raises(BadRequest, match="key"):
        ds.connect(server.url, "other")


def test_without_diagnostics_it_says_how_to_get_tokens(serve):
    session = serve("Yes.", diagnostics=False).session()
    session.chat("Hi", thinking=False).wait()
    with pytest.raises(BadRequest, match="--diagnostics"):
        session.rewind(1)


def test_nobody_there_is_said_with_the_address():
    with pytest.raises(Ds4Error, match="127.0.0.1:9 does not answer"):
        ds.connect("http://127.0.0.1:9")


def test_an_answer_that_the_connection_loses_is_not_taken_for_a_whole_one(serve):
    server = serve("a" * 3000, step_s=0.002)
    line = Line(server)
    answer = iter(ds.connect(line.url).session().chat("Go on", thinking=False))
    next(answer)
    line.cut()
    with pytest.raises(Ds4Error, match="broke before the answer was whole"):
        list(answer)


@pytest.mark.parametrize("said", [b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>"])
def test_who_is_no_server_of_ours_is_told_so(said):
    def answer():
        with other.accept()[0] as connection:
            connection.recv(4096), connection.sendall(said)

    with socket.create_server(("127.0.0.1", 0)) as other:
        threading.Thread(target=answer).start()
        with pytest.raises(Ds4Error, match="does not answer|is no server of ours"):
            ds.connect(f"http://127.0.0.1:{other.getsockname()[1]}")


def test_an_address_needs_no_scheme(serve):
    server = ds.connect(serve("Yes.").url.removeprefix("http://"))
    assert server.session().chat("Hi", thinking=False).wait().text == "Yes."


@pytest.mark.parametrize("stop", ["e riv", ["x", "e riv"]])
def test_one_stop_string_reaches_the_server_as_one(serve, stop):
    assert serve("The river.").session().chat("What?", thinking=False, stop=stop).wait().text == "Th"


def test_events_end_with_finish(serve):
    assert isinstance(list(serve("Yes.").session().chat("Hi").events())[-1], Finish)
