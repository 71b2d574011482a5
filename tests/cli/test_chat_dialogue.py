"""What is said in a chat: how it is asked for, forgotten, written and read."""
import json
import os
import stat

import pytest

from ds4mlx.cli.chat_dialogue import Dialogue, Said
from ds4mlx.errors import UsageError


def talked(*pairs, **kwargs):
    dialogue = Dialogue(**kwargs)
    for question, answer in pairs:
        dialogue.ask(question)
        dialogue.answer(answer, "because")
    return dialogue


def test_a_request_holds_everything_that_was_said():
    dialogue = talked(("a", "b"), system="Be brief.")
    dialogue.ask("c")
    assert dialogue.body()["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"}, {"role": "user", "content": "c"}]


@pytest.mark.parametrize("think, fields", [("off", {"thinking": False}), ("on", {"thinking": True}),
                                           ("max", {"thinking": True, "reasoning_effort": "max"})])
def test_thinking_is_asked_for_as_servers_are_asked(think, fields):
    body = Dialogue(think=think).body()
    assert {key: value for key, value in body.items() if key != "messages"} == fields


def test_a_question_that_came_to_nothing_was_never_asked():
    dialogue = talked(("a", "b"))
    dialogue.ask("c")
    dialogue.answer("", "")
    assert dialogue.said == talked(("a", "b")).said


def test_reasoning_alone_is_something():
    dialogue = Dialogue()
    dialogue.ask("a")
    dialogue.answer("", "well")
    assert dialogue.said == [Said("user", "a"), Said("assistant", "", "well")]


def test_undo_forgets_a_question_with_its_answer():
    dialogue = talked(("a", "b"), ("c", "d"))
    assert dialogue.undo() == "c" and dialogue.said == talked(("a", "b")).said
    assert dialogue.undo() == "a" and dialogue.undo() is None


def test_the_same_question_is_drawn_anew_each_time_it_is_asked_and_alike_in_another_run():
    def seeds():
        dialogue = Dialogue()
        for _ in range(3):
            yield dialogue.body(seed=7)["seed"]
            dialogue.ask("a")
            dialogue.answer("b", "")
            dialogue.undo()
    assert list(seeds()) == list(seeds()) and len(set(seeds())) == 3


def test_a_file_gives_back_what_was_written(tmp_path):
    dialogue = talked(("a 中", "b\n"), system="s", think="low")
    dialogue.write(tmp_path / "chat.json")
    back = Dialogue.read(tmp_path / "chat.json")
    assert (back.said, back.system, back.think) == (dialogue.said, "s", "low")


def test_a_file_is_private_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "chat.json"
    talked(("a", "b")).write(path)
    talked(("c", "d")).write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and Dialogue.read(path).said[0].content == "c"
    assert os.listdir(tmp_path) == ["chat.json"]


def test_a_file_of_something_else_is_not_replaced(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"my": "things"}')
    with pytest.raises(UsageError, match="give another name"):
        Dialogue().write(path)
    assert path.read_text() == '{"my": "things"}'


def test_messages_of_other_programs_are_read_too(tmp_path):
    path = tmp_path / "messages.json"
    path.write_text(json.dumps([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]))
    assert Dialogue.read(path).said == [Said("user", "a"), Said("assistant", "b")]


@pytest.mark.parametrize("content, told", [
    ("{", "not JSON"), ("5", "no messages"), ('{"messages": 5}', "no messages"), ("[" * 100_000, "not JSON"),
    ('{"messages": [], "think": "hard"}', "no messages"), ('[{"role": "user"}]', "messages[0]"),
    ('[{"role": "assistant", "content": "a"}]', "need 'user'"), ('[{"role": "user", "content": "a"}]', "the user's"),
    ('[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]', "need 'assistant'")])
def test_what_is_no_conversation_is_refused_with_the_reason(tmp_path, content, told):
    path = tmp_path / "chat.json"
    path.write_text(content)
    with pytest.raises(UsageError) as refused:
        Dialogue.read(path)
    assert told in str(refused.value) and str(path) in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="No such file"):
        Dialogue.read(tmp_path / "none.json")
