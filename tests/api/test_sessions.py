"""The Python interface to a model on this machine."""
import json

import numpy as np
import pytest

import ds4mlx as ds
from ds4mlx.chat.events import Finish
from ds4mlx.errors import BadRequest, CheckpointError, ModelFileError

GREEDY = ds.Sampling(temperature=0)


def test_pieces_joined_are_the_text_of_the_answer(model, session):
    answer = session.chat("Hi", thinking=False, max_tokens=8, sampling=GREEDY)
    assert "".join(answer) == answer.text == str(answer) != ""
    assert session.tokens == model.render(session.messages[:1], thinking=False).tokens + answer.tokens
    assert session.messages[1]["content"] == answer.text


def test_the_answer_is_what_the_engine_s_logits_say(session):
    said = session.complete("The river", max_tokens=4, sampling=GREEDY).wait().tokens
    session.rewind(-len(said))
    for token in said:
        assert session.logits().argmax() == token
        session.read([token])


def test_one_stop_string_is_not_its_letters(session):
    said = session.complete("The river", max_tokens=12, sampling=GREEDY).wait().text
    session.rewind(0)
    assert session.complete("The river", sampling=GREEDY, stop=said[4:8]).wait().text == said[:said.find(said[4:8])]


def test_an_answer_can_be_broken_off_and_gone_on_with(session):
    answer = session.complete("The river", max_tokens=12, sampling=GREEDY)
    first = next(iter(answer))
    resumed = first + "".join(answer)
    assert isinstance(answer.finish, Finish)
    session.rewind(0)
    assert session.complete("The river", max_tokens=12, sampling=GREEDY).wait().text == resumed


def test_what_was_said_of_a_broken_off_answer_stays_in_the_conversation(session):
    answer = session.chat("Hi", thinking=False, max_tokens=50, sampling=GREEDY)
    next(iter(answer))
    session.chat("And?", max_tokens=1)
    assert [message["role"] for message in session.messages] == ["user", "assistant", "user"]
    assert session.messages[1]["content"] == answer.text
    assert list(answer) == [] and len(answer.tokens) < 50


def test_the_second_turn_reads_only_what_is_new(session):
    session.chat("Tell me of rivers", thinking=False, max_tokens=6, sampling=GREEDY).wait()
    before = len(session.tokens)
    finish = session.chat("And of lakes?", max_tokens=1).wait().finish
    assert 0 < before - 7 <= finish.usage.cached_tokens < finish.usage.prompt_tokens


LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {
    "type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"],
    "additionalProperties": False}}}


def test_a_call_can_be_forced_and_its_result_given(session):
    answer = session.chat("Look!", tools=[LOOK], tool_choice="required", thinking=False, sampling=GREEDY).wait()
    ((name, arguments),) = answer.calls
    assert name == "look" and json.loads(arguments)["at"] in ("sea", "sky") and answer.finish.reason == "tool_calls"
    session.chat([{"role": "tool", "tool_call_id": answer.call_ids[0], "content": "blue"}], max_tokens=2).wait()
    assert [message["role"] for message in session.messages] == ["user", "assistant", "tool", "assistant"]


def test_an_answer_keeps_to_a_response_format(session):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"],
              "additionalProperties": False}
    said = session.chat("A number", thinking=False, response_format={"type": "json_schema", "json_schema": {
        "name": "number", "schema": schema, "strict": True}}).wait().text
    assert 1 <= json.loads(said)["n"] <= 9


@pytest.mark.parametrize("asked", [
    {"tools": [LOOK], "tool_choice": "required", "thinking": False}, {"thinking": False, "max_tokens": 60},
    {"max_tokens": 300}], ids=["call", "words", "reasoning"])
def test_the_next_turn_goes_on_from_the_very_tokens_that_were_sampled(session, asked):
    """Calls that were sampled, reasoning that the prompt would leave out, words in other tokens: all stay."""
    answer = session.chat("Look!", **asked).wait()
    before = session.tokens
    assert bool(answer.reasoning) == ("thinking" not in asked) and bool(answer.calls) == ("tools" in asked)
    usage = session.chat("And?", max_tokens=1).wait().finish.usage
    assert session.tokens[:len(before)] == before and usage.cached_tokens >= len(before) - 2


def test_what_cannot_be_read_changes_nothing(session):
    session.read([1, 2, 3])
    with pytest.raises(BadRequest, match="tool_choice"):
        session.chat("Hi", tool_choice={"type": "function", "function": {"name": "absent"}})
    assert session.tokens == [1, 2, 3] and session.messages == []


def test_reasoning_is_apart_from_the_text(session):
    answer = session.chat("Hi", thinking=True, max_tokens=5, sampling=GREEDY).wait()
    assert answer.reasoning and answer.reasoning not in answer.text
    assert session.messages[-1]["reasoning_content"] == answer.reasoning


@pytest.mark.parametrize("length", [0, 1, 5, -3])
def test_rewind_reaches_any_length_exactly(session, model, length):
    session.complete("The river begins in the hills", max_tokens=6, sampling=GREEDY).wait()
    wanted = session.tokens[:length]
    session.rewind(length)
    assert session.tokens == wanted
    if wanted:
        with model.session() as other:
            other.read(wanted)
            np.testing.assert_allclose(session.logits(), other.logits(), atol=1e-4)  # chunks cut elsewhere


def test_rewind_forgets_the_messages_that_are_no_longer_whole(session):
    session.chat("One", thinking=False, max_tokens=3, sampling=GREEDY).wait()
    kept = len(session.tokens)
    session.chat("Two", max_tokens=3, sampling=GREEDY).wait()
    session.rewind(kept)
    assert [message["role"] for message in session.messages] == ["user", "assistant"]
    session.rewind(kept - 4)
    assert [message["content"] for message in session.messages] == ["One"]


def test_a_fork_goes_its_own_way(session):
    session.complete("The river", max_tokens=4, sampling=GREEDY).wait()
    with session.fork() as fork:
        assert fork.tokens == session.tokens and fork.text == session.text
        np.testing.assert_array_equal(fork.logits(), session.logits())
        before = session.tokens
        fork.complete(" and the sea", max_tokens=3).wait()
        assert session.tokens == before


def test_a_saved_session_goes_on_as_if_it_had_never_stopped(session, model, tmp_path):
    session.chat("Hi", thinking=False, max_tokens=5, sampling=GREEDY).wait()
    session.save(tmp_path / "talk.kvm")
    with model.session() as other:
        other.load(tmp_path / "talk.kvm")
        assert other.tokens == session.tokens and other.messages == session.messages
        np.testing.assert_array_equal(other.logits(), session.logits())


def test_a_damaged_file_is_refused_and_changes_nothing(session, tmp_path):
    session.read([1, 2, 3])
    session.save(tmp_path / "talk.kvm")
    raw = bytearray((tmp_path / "talk.kvm").read_bytes())
    raw[-100] ^= 1
    (tmp_path / "talk.kvm").write_bytes(raw)
    session.read([4])
    with pytest.raises(CheckpointError, match="CRC"):
        session.load(tmp_path / "talk.kvm")
    assert session.tokens == [1, 2, 3, 4]


def test_what_does_not_fit_is_refused_and_changes_nothing(model):
    with model.session(context=32) as session:
        session.read(range(20, 30))
        with pytest.raises(BadRequest, match="the session takes 32"):
            session.complete("word " * 40)
        assert session.tokens == list(range(20, 30))


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises((ModelFileError, FileNotFoundError), match="absent"):
        ds.load(tmp_path / "absent.gguf")
