"""A budget of tokens, and how reasoning is kept from taking all of it. On the scripted engine."""
import pytest

from ds4mlx.engine.protocol import Sampling
from ds4mlx.engine.stub import StubEngine
from ds4mlx.evaluation.asking import Budget, ask
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.segments import THINK_CLOSE
from ds4mlx.text.tokenizer import Tokenizer

CALL = ('<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="at" string="true">the moon'
        '</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')


@pytest.fixture(scope="module")
def tokenizer(tiny_path):
    with GGUF.open(tiny_path) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture
def answer(tokenizer):
    """answer(script, budget): what comes of a model that says the script, marked text or ids; logs phases."""
    def answered(script, budget=Budget(), thinking=True, tools=(), told=lambda progress: True):
        ids = tokenizer.encode_marked(script) if isinstance(script, str) else script
        engine = StubEngine(lambda prompt: ids, vocab=tokenizer.vocab_size, eos=tokenizer.eos)
        return ask(engine, engine.open(4096), tokenizer, [5] * 20, thinking=thinking, tools=tools,
                   sampling=Sampling(temperature=0.0), budget=budget, chunk=8, told=told)
    return answered


def test_an_answer_is_all_that_was_said_without_its_end(answer):
    found = answer("so</think>Answer: 5 中文")
    assert (found.said.text, found.said.whole, found.end, found.closed) == (
        "so</think>Answer: 5 中文", True, "stop", "model")


def test_an_answer_may_take_all_of_its_tokens_and_no_more(answer, tokenizer):
    found = answer("</think>" + "word " * 50, Budget(30, 8, 4))
    assert (found.tokens, found.end, found.said.whole) == (30, "length", False)


def test_the_hard_limit_ends_reasoning(answer, tokenizer):
    word = tokenizer.encode_literal("word")[0]
    found = answer([word] * 100, Budget(30, 4, 4))
    close = tokenizer.decode([word]) * 26 + THINK_CLOSE
    assert found.said.text.startswith(close) and found.closed == "hard" and found.tokens == 30


def test_the_soft_limit_waits_for_a_model_that_is_nearly_ready(answer, tokenizer):
    word, close = tokenizer.encode_literal("word")[0], tokenizer.control[THINK_CLOSE]
    engine_noise = 4096     # every token is among so many likeliest
    found = answer([word] * 100, Budget(30, 10, 2, rank=engine_noise))
    assert found.closed == "soft" and found.said.text.count(THINK_CLOSE) == 1 and close != word
    assert found.said.text.startswith(tokenizer.decode([word]) * 20 + THINK_CLOSE)
    assert answer([word] * 100, Budget(30, 10, 2, rank=1)).closed == "hard"


def test_limits_let_an_answer_alone_that_is_past_its_reasoning(answer):
    found = answer("</think>" + "word " * 8, Budget(40, 39, 38))
    assert found.closed == "model" and found.said.text == "</think>" + "word " * 8


def test_without_reasoning_nothing_is_closed(answer):
    found = answer("one two", Budget(100, 99, 98), thinking=False)
    assert (found.said.text, found.closed) == ("one two", "model")


def test_calls_are_read_and_end_the_answer(answer):
    found = answer("</think>" + CALL + "more", tools=["look"])
    assert found.said.calls == (("look", '{"at":"the moon"}'),) and found.end == "stop"


def test_the_text_comes_as_it_is_said_characters_whole(answer):
    seen = []
    answer("one</think>中文 👩‍💻", told=lambda progress: seen.append(progress) or True)
    assert [p.done for p in seen if p.phase == "prefill"] == [0, 8, 16]
    assert "".join(p.text for p in seen) == "one</think>中文 👩‍💻" and {p.phase for p in seen} == {
        "prefill", "thinking", "answering"}


@pytest.mark.parametrize("phase", ["prefill", "thinking"])
def test_what_is_stopped_keeps_what_there_is(answer, phase):
    found = answer("one two three</think>", told=lambda progress: progress.phase != phase)
    assert found.end == "cancelled" and found.tokens == (phase == "thinking") and not found.said.whole
