"""What one does wrong in a notebook is told in words, at once, and harms nothing."""
import asyncio
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import ds4mlx as ds
from ds4mlx.errors import BadRequest, CheckpointError, Ds4Error, UsageError

GREEDY = ds.Sampling(temperature=0)


@pytest.mark.parametrize("said", [None, 5, ["Hi"], {"role": "user", "content": "Hi"}, [{"role": "user"}, "Hi"]])
def test_what_is_no_message_is_refused_with_an_example_of_one(model, session, said):
    for ask in session.chat, model.render:
        with pytest.raises(BadRequest, match='need a text, or a list of messages such as {"role": "user"'):
            ask(said)
    assert session.tokens == [] and session.messages == []


@pytest.mark.parametrize("asked, fault", [
    ({"max_tokens": -1}, "max_tokens is -1"), ({"max_tokens": "5"}, "max_tokens is '5'"),
    ({"sampling": 0.5}, "need such as ds4mlx.Sampling"), ({"tools": [len]}, r"tools\[0\] is a builtin_function"),
])
def test_what_is_asked_for_is_looked_at_before_anything_is_read(session, asked, fault):
    with pytest.raises(BadRequest, match=fault):
        session.chat("Hi", **asked)
    assert session.tokens == []


@pytest.mark.parametrize("name, value", [
    ("temperature", -1), ("temperature", float("nan")), ("top_p", 5), ("seed", None), ("repetition_penalty", 0)])
def test_a_number_that_means_nothing_is_no_sampling(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}, need a number from"):
        ds.Sampling(**{name: value})


@pytest.mark.parametrize("wrong", [{"ctx": -5}, {"ctx": "many"}, {"ctx": None}, {"engine": "metal"},
                                   {"prefill_chunk": 100}])
def test_settings_made_in_python_are_checked_as_flags_are(tiny_path, wrong):
    with pytest.raises(UsageError, match=f"settings.{min(wrong)} is .*, need"):
        ds.load(tiny_path, ds.Settings(**wrong))


def test_settings_show_what_differs_and_never_the_key():
    assert repr(ds.Settings()) == "Settings()"
    assert repr(ds.Settings(ctx=4096, api_key="secret")) == "Settings(ctx=4096)"


def test_tokens_may_be_numpy_s_and_must_be_whole(session):
    session.read(np.array([1, 2], np.int32))
    assert session.tokens == [1, 2]
    with pytest.raises(TypeError):
        session.read([1.5])


def test_taps_of_a_layer_that_is_not_there_are_refused(model, session):
    session.read([1, 2])
    with pytest.raises(ValueError, match=f"the model has 0 to {model.layers - 1}"):
        session.taps(layers=[model.layers])


def test_streams_of_another_shape_have_no_logits(model):
    with pytest.raises(ValueError, match=r"need \(tokens, 4, "):
        model.lens(np.zeros((1, 2, 3), np.float32))


@pytest.mark.parametrize("steering", ["river.f32", ds.Steering(np.zeros((2, 3), np.float32))])
def test_directions_of_another_model_are_refused_before_they_are_used(model, steering):
    with pytest.raises(UsageError, match="steering is 'river.f32'|directions are of shape"):
        model.session(steering=steering)


@pytest.mark.parametrize("pairs", [[], ["ab"], [("a", "b", "c")]])
def test_directions_need_pairs(model, pairs):
    with pytest.raises(ValueError, match="pairs of prompts"):
        ds.directions(model, pairs)


def test_a_file_that_no_session_saved_is_named(session, tmp_path):
    (tmp_path / "notes.txt").write_text("The river")
    with pytest.raises(CheckpointError, match="notes.txt: .*give a file that a session saved"):
        session.load(tmp_path / "notes.txt")


def test_what_is_closed_says_so(tiny_path):
    with ds.load(tiny_path, ds.Settings(ctx=64)) as model:
        closed, other = model.session(), model.session()
        closed.close()
        with pytest.raises(ValueError, match="the session is closed; open another one"):
            closed.chat("Hi")
    for use in model.session, lambda: other.chat("Hi"), lambda: model.lens(np.zeros((1, 4, 1))):
        with pytest.raises(ValueError, match="the model is closed; load it again"):
            use()


def test_another_thread_is_told_how_to_go_about_it(model, session):
    async def ask():
        with pytest.raises(UsageError, match="belongs to the thread that loaded it"):
            await asyncio.to_thread(session.chat, "Hi")
    asyncio.run(ask())
    assert session.complete("The river", max_tokens=2).wait().tokens    # and nothing is lost


def test_a_thread_of_its_own_lets_a_model_be_awaited(tiny_path):
    async def ask(thread):
        loop = asyncio.get_running_loop()
        model = await loop.run_in_executor(thread, ds.load, tiny_path, ds.Settings(ctx=64))
        answer = await loop.run_in_executor(thread, lambda: model.session().complete("The river", max_tokens=2).wait())
        await loop.run_in_executor(thread, model.close)
        return answer.tokens
    with ThreadPoolExecutor(1) as thread:
        assert len(asyncio.run(ask(thread))) == 2


def test_what_a_notebook_shows_of_a_name_fits_a_line_or_two(model, session):
    answer = session.chat("Hi", thinking=False, max_tokens=100, sampling=GREEDY)
    assert repr(answer) == "<Answer '', more to come: iterate over it, or wait()>"
    assert repr(answer.wait()).endswith(f", {answer.finish.reason}>")
    assert repr(session) == f"<Session of {len(session.tokens)} tokens of 1024, 2 messages>"
    taps = session.taps(-2)
    shown = [model, model.tokenizer, session, answer, taps, taps.layers[0], ds.Steering(np.zeros((2, 3), np.float32))]
    assert all(40 < len(repr(each)) < 300 and " object at 0x" not in repr(each) for each in shown)


def test_an_answer_that_was_left_for_another_was_broken_off(session):
    answer = session.complete("The river", max_tokens=50, sampling=GREEDY)
    next(iter(answer))
    session.rewind(0)
    assert repr(answer).endswith(", broken off>") and answer.finish is None


def test_every_error_of_these_can_be_caught_as_one():
    assert all(issubclass(kind, Ds4Error) for kind in (BadRequest, CheckpointError, UsageError))
