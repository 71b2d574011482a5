"""What the built-in model learns: rendered as by the server, packed into rows, seeded, and in two halves."""
import re
from itertools import islice
from random import Random

import numpy as np
import pytest

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, TextPart, Tool
from ds4mlx.text.segments import ASSISTANT, rendered_text
from ds4mlx.tiny import lessons
from ds4mlx.tiny.lessons.encoding import Encoder
from ds4mlx.tiny.lessons.episode import Ask, Call, Episode, Reply
from ds4mlx.tiny.lessons.known import KNOWN
from ds4mlx.tiny.lessons.mixing import STAGES, episode
from ds4mlx.tiny.lessons.packing import ANSWER, weights_of
from ds4mlx.tiny.lessons.tasks import endless, held_out, needles
from ds4mlx.tiny.lessons.texts import texts
from ds4mlx.tiny.lessons.tooling import Size, drill, plan, refusal, toolbox
from ds4mlx.tiny.lessons.words import Words, held, listed

LENGTHS = {1: 256, 2: 1024, 3: 4096}


def some(stage, count=40):
    words = Words(Random(7))
    return [episode(words, stage, LENGTHS[stage]) for _ in range(count)]


@pytest.mark.parametrize("stage", STAGES)
def test_rows_are_the_same_for_the_same_seed_and_begin_with_a_lesson(stage):
    first, again = (list(islice(lessons.rows(3, LENGTHS[stage], stage), 4)) for _ in range(2))
    for (ids, weights), (same, _) in zip(first, again):
        assert ids.dtype == np.uint16 and weights.dtype == np.uint8 and len(ids) == len(weights) == LENGTHS[stage]
        assert (ids == same).all() and ids[0] == lessons.vocabulary().bos and ids.max() < 3072


def test_rows_have_many_tools_to_choose_from_though_such_lessons_are_long():
    offered = []
    for ids, _ in islice(lessons.rows(6, 2048, 2), 40):
        for lesson in lessons.vocabulary().decode(ids.tolist()).split("<｜begin▁of▁sentence｜>")[1:]:
            offered.append(lesson.split("<｜User｜>")[0].count('\n{"name": "'))
    offered = np.array(offered)
    assert (offered >= 5).sum() > 0.4 * (offered > 0).sum()     # of tasks, 54 % have as many


def test_another_seed_gives_other_rows():
    assert (next(lessons.rows(1, 512, 1))[0] != next(lessons.rows(2, 512, 1))[0]).any()


def test_a_stage_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match="stage is 4, need one of"):
        next(lessons.rows(1, 512, 4))


def test_answers_alone_have_the_full_weight():
    tokenizer = lessons.vocabulary()
    for made in some(2, 20):
        ids = np.array(tokenizer.encode(made.segments()))
        learned = tokenizer.decode(ids[weights_of(ids, tokenizer, 4) == ANSWER])
        answers = [part.split("<｜User｜>")[0].removeprefix("<think>") for part in
                   rendered_text(made.segments()).split(ASSISTANT)[1:]]
        assert learned == "".join(answer if made.thinking and "<think>" in rendered_text(made.segments()) and
                                  not answer.startswith("</think>") else answer.removeprefix("</think>")
                                  for answer in answers)


@pytest.mark.parametrize("stage", STAGES)
def test_the_fast_encoder_gives_the_tokenizers_ids(stage):
    tokenizer = lessons.vocabulary()
    encoder = Encoder(tokenizer)
    for made in some(stage):
        assert encoder.encode(made.segments()) == tokenizer.encode(made.segments())


def test_a_lesson_begins_as_the_servers_prompt_for_its_first_question():
    for made in (made for made in some(2) if isinstance(made, Episode) and not made.bare):
        tools = tuple(Tool(schema["name"], schema) for schema in made.tools)
        messages = (Message("system", (TextPart(made.system),)), Message("user", (TextPart(made.turns[0].text),)))
        prompt = render(Conversation(messages, tools, made.thinking, made.effort), effort_profile="0731")
        text, whole = rendered_text(prompt.segments), rendered_text(made.segments())
        assert whole.startswith(text) or not made.tools and whole.startswith(text.removesuffix("<think>"))


def test_no_word_is_in_both_halves():
    for name in ("nouns", "people", "places", "keys", "verbs", "adjectives"):
        learned, kept = listed(name, False), listed(name, True)
        assert not set(learned) & set(kept) and min(len(learned), len(kept)) >= 10
    assert {held(Words(Random(seed)).word()) for seed in range(200)} == {False}
    assert {held(Words(Random(seed), of_held=True).word()) for seed in range(200)} == {True}


def test_a_name_has_the_same_tokens_wherever_it_stands():
    tokenizer = lessons.vocabulary()
    for name in ("brindle", "zorvex_kelu", "Paris", "src/kalo.py", "4821", "KX-4821"):
        ids = tokenizer.encode_literal(name)
        for before, after in ((' "', '", '), ('">', "</"), (': ', "\n"), ('="', '">')):
            inside = tokenizer.encode_literal(before + name + after)
            assert any(inside[i:i + len(ids)] == ids for i in range(len(inside))), (name, before)


def test_thoughts_spell_names_in_the_tokens_of_their_schemas():
    tokenizer = lessons.vocabulary()
    for name in ("show_folder", "getTimeBox", "mcp__brindle__send-mail"):
        thought = tokenizer.encode_literal(plan([Call(name, {"path": 1, name: 2})]))
        ids = tokenizer.encode_literal(name)
        assert sum(thought[i:i + len(ids)] == ids for i in range(len(thought))) == 2


def test_tasks_have_names_that_no_lesson_has():
    tools = [schema for task in held_out(1, 60) for schema in task.tools]
    learned = {schema["name"] for made in some(2, 300) for schema in made.tools}
    assert len(tools) > 100 and not learned & {schema["name"] for schema in tools}
    common = {name for tool in KNOWN for value in tool.values for name in value.strip("?").split(": ")[0].split()}
    named = {name for schema in tools for name in schema["parameters"]["properties"]}
    assert len(named) > 200 and not named & (common | set(listed("keys", False)) | set(listed("nouns", False)))


def test_a_task_asks_for_calls_of_the_tools_that_it_offers():
    for task in held_out(2, 60):
        schemas = {schema["name"]: schema["parameters"] for schema in task.tools}
        for call in task.calls:
            assert set(schemas[call.name]["required"]) <= set(call.arguments) <= set(schemas[call.name]["properties"])
        assert len(task.results) == len(task.calls)
        assert all(any(value in text for text in task.results) for value in task.stated)


def test_a_drill_asks_for_many_tools_in_some_for_each_in_turn():
    words, in_turn = Words(Random(4), varied=True), 0
    for _ in range(40):
        words.begin()
        tools = toolbox(words, Size(fewest=4))
        turns = drill(words, tools, 10)
        called = [call.name for turn in turns if isinstance(turn, Reply) for call in turn.calls]
        assert len(set(called)) > 1 and set(called) <= {tool.name for tool in tools}
        assert sum(isinstance(turn, Ask) for turn in turns) == 10
        in_turn += len(set(called[:len(tools)])) == len(tools)
    assert 10 < in_turn < 34


def test_varied_lessons_offer_tools_that_share_a_verb_or_a_thing():
    def alike(varied):
        words, shared = Words(Random(5), varied=varied), 0
        for _ in range(200):
            words.begin()
            parts = [part for tool in toolbox(words, Size(fewest=4), known_share=0.0)
                     for part in {tool.action.split()[0], tool.action.split()[-1]}]
            shared += len(parts) > len(set(parts))
        return shared / 200
    assert alike(varied=True) > 0.6 and alike(varied=False) < 0.3


def test_what_no_tool_can_do_is_what_none_of_them_does():
    words = Words(Random(6), varied=True)
    for _ in range(150):
        words.begin()
        tools = toolbox(words, Size(fewest=4), known_share=0.0)
        turns = drill(words, tools, 6)
        asked = [turn.text.lower() for turn, answer in zip(turns, turns[1:]) if answer == refusal()]
        assert not any(f"{tool.action} " in text or tool.name in text for text in asked for tool in tools)


def test_tasks_have_no_more_words_in_common_than_chance_gives():
    """What makes lessons harder is not in tasks: no two of a task's invented tools have one thing."""
    for task in held_out(4, 100):
        things = [schema["description"].rstrip(".").split()[-1] for schema in task.tools]
        plain = [thing for thing, schema in zip(things, task.tools) if f"the {thing}" in schema["description"]]
        assert len(plain) == len(set(plain))


def test_the_right_answers_to_tasks_are_rows_to_mark_by():
    ids, weights = next(lessons.task_rows(8, 2048))
    text, answers = (lessons.vocabulary().decode(row.tolist()) for row in (ids, ids[weights == ANSWER]))
    first = next(task for task in endless(8) if task.calls)
    assert first.question in text and all(f'invoke name="{call.name}"' in answers for call in first.calls)


def test_a_needle_lies_as_far_back_as_it_says():
    tokenizer = lessons.vocabulary()
    for task in needles(3, 6):
        behind = task.question[task.question.index(task.stated[0]):]
        assert 0.7 * task.back < len(tokenizer.encode_literal(behind)) < 1.5 * task.back


def test_lessons_as_text_have_the_ids_of_the_rows():
    tokenizer = lessons.vocabulary()
    for text in texts(0, 20, 2, 1024):
        assert text == tokenizer.decode(tokenizer.encode_marked(text)) and text.endswith("<｜end▁of▁sentence｜>")


def test_exchanged_pieces_keep_copies_copies():
    text = "".join(lessons.vocabulary().decode(ids) for ids, _ in islice(lessons.rows(11, 512, 1), 90))
    repeated = re.findall("<｜User｜>Echo ([^<]*)<｜Assistant｜>([^｜]*)<｜end", text)
    assert len(repeated) > 20 and all(answer.endswith(asked) for asked, answer in repeated)
