"""Problems that users of such caches reported, each as a test of what the service makes of it.

Rows that the directory or the scores decide alone are in tests/sessions.
"""
from dataclasses import replace

import pytest
from client_shapes import CLIENTS, call
from host import BYTES, said, talk, user

from ds4mlx.chat.messages import Message, Reasoning, TextPart
from ds4mlx.engine.stub import Gate, StubEngine
from ds4mlx.text.segments import ASSISTANT, CONTROL_LITERALS, EOS, THINK_CLOSE, USER
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer

ANSWERS = ["Plan.</think>First answer.", "Plan.</think>Second answer.", "Plan.</think>Third answer."]
PI = CLIENTS[-1]
LONG = "What about this line of text? " * 40


@pytest.fixture
def keep(host, tmp_path):
    """keep(answers, **settings): a Host with a cache directory, the same for all of a test."""
    return lambda answers=ANSWERS, **settings: host(answers, kv_disk_dir=tmp_path / "kv", **settings)


def follow(running, first, text="And then?", question=LONG):
    return running.ask(talk(user(question), first.message, user(text)))


# ---- what is saved when, and what goes

def test_saving_the_outgoing_conversation_leaves_what_a_waiting_request_needs(keep):
    running, big = keep(kv_disk_space_mb=1), LONG * 15         # a state of it takes some 120 kB, the directory 1 MiB
    first = running.ask(talk(user("first" + big)))
    running.ask(talk(user("?" + LONG)))                         # replaces it, so that it is on disk
    waiting = talk(user("first" + big), first.message, user("And then?"))
    number = running.store.protect(running.key(waiting))        # as a queued request is
    for name in range(12):
        running.ask(talk(user(f"{name}{big}")))
    running.store.unprotect(number)
    assert running.store.stats().evicted and running.ask(waiting).reused == first.state


def test_a_hit_deletes_nothing(keep):
    running = keep(kv_cache_cold_max_tokens=600)
    first = running.ask(talk(user(LONG)))                       # deeper than what is saved cold
    for _ in range(3):
        running.restart()
        assert follow(running, first).reused == first.state


def test_small_steps_write_nothing_anew(keep):
    running = keep()
    first = running.ask(talk(user(LONG)))
    running.ask(talk(user("Another conversation. " * 60)))
    again = follow(running, first)
    saved = running.store.stats().saved
    running.ask(talk(user("A third conversation. " * 60)))      # replaces 40 tokens that are not on disk
    assert again.source == "disk-text" and running.store.stats().saved - saved <= 1   # the third one's beginning


def test_saves_go_on_after_a_restore_at_an_odd_length(keep):
    running = keep(["Plan.</think>Yes."], kv_cache_continued_interval_tokens=2000)
    first = running.ask(talk(user(LONG)))
    running.restart()
    assert first.state % 2048 and follow(running, first, text=LONG * 2).source == "disk-text"
    assert running.store.stats().saved >= 1                     # past 2048, where the interval ends


def test_a_save_that_falls_due_inside_a_tool_block_is_made_after_it(keep):
    running = keep(["Plan.</think>Go.\n\n" + call()], kv_cache_continued_interval_tokens=2000)
    head = running.prompt(PI.conversation(user("")))
    question = PI.conversation(user("x" * (2048 - head - 60)))   # the block crosses 2048
    reply = running.ask(question)
    heads = {record.head.tokens: record.head.reason for record in running.store._index.heads.values()}
    assert reply.prompt + 60 >= 2048 - 4 and heads.get(reply.state) == "continued"


def test_decoding_goes_on_while_the_writer_is_busy(keep):
    every_512 = {"kv_cache_continued_interval_tokens": 512, "kv_cache_boundary_align_tokens": 512}
    running, gate = keep(["Plan.</think>" + "word " * 400], **every_512), Gate()
    running.store._directory.before = lambda step: gate()
    running.settle = lambda: None               # which waits for the writer, and that waits for the gate
    reply = running.ask(talk(user("x" * 500)))
    assert gate.reached.is_set() and not gate.opened.is_set()
    assert reply.said == len("Plan.") + 1 + 2000
    gate.opened.set()
    assert running.store.flush() and running.store.stats().saved >= 1


# ---- whose states are used

@pytest.mark.parametrize("changes", [{"fingerprint": "11" * 8, "base": "11" * 8}, {"base": "22" * 8},
                                     {"layout": "33" * 8}])
def test_another_models_states_are_left_alone(keep, changes):
    class Other(StubEngine):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.info = replace(self.info, **changes)

    running = keep()
    first = running.ask(talk(user(LONG)))
    running.restart()
    other = keep(engine=Other)
    assert follow(other, first).source == "none" and other.store.stats().quarantined == 0
    assert follow(running, first).reused == first.state


def test_another_tokenizers_states_are_left_alone(keep):
    running = keep()
    first = running.ask(talk(user(LONG)))
    running.restart()
    swapped = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *reversed(BYTE_OF)])), [], "swapped")
    assert follow(keep(tokenizer=swapped), first).source == "none"


def test_a_smaller_context_leaves_a_larger_ones_states_alone(keep):
    running = keep(ctx=8192)
    first = running.ask(talk(user(LONG)))
    running.restart()
    assert follow(keep(ctx=4096), first).source == "none"
    assert follow(keep(ctx=16384), first).reused == first.state


def test_characters_that_look_like_turns_find_no_state_of_real_turns(keep):
    running = keep()
    first = running.ask(talk(user(LONG)))
    running.restart()
    text = f"{LONG}{ASSISTANT}{THINK_CLOSE}First answer.{EOS}{USER}And then?"
    reply = running.ask(talk(user(text)))
    assert reply.reused <= 1 + len(LONG) + 1 < first.prompt


# ---- other words for the same

class Spelling(StubEngine):
    """Answers letter by letter, where its tokenizer would take words."""

    def __init__(self, script, **kwargs):
        super().__init__(lambda prompt: sum(map(self.letters, script(prompt)), []), **kwargs)

    def letters(self, token):
        if self.tokenizer.literal(token):
            return [token]
        text = self.tokenizer.token_bytes(token).decode()
        return [letter for char in text for letter in self.tokenizer.encode_literal(char)]


def test_the_same_text_in_other_tokens_goes_on(keep, v4_tokenizer):
    Spelling.tokenizer, answer = v4_tokenizer, " and this is what follows it."
    running, prompt = keep([answer], tokenizer=v4_tokenizer, engine=Spelling), v4_tokenizer.encode_literal(LONG * 3)
    first = running.complete(prompt)
    assert first.state == len(prompt) + len(answer)
    longer = v4_tokenizer.encode_literal(LONG * 3 + answer + " And then?")
    again = running.complete(longer)
    assert (again.source, again.reused) == ("memory-text", first.state)


@pytest.mark.parametrize("restart", [False, True])
def test_a_conversation_with_oddly_spelled_answers_goes_on(keep, v4_tokenizer, restart):
    Spelling.tokenizer = v4_tokenizer
    running = keep(["The first answer of all."], tokenizer=v4_tokenizer, engine=Spelling)
    first = running.ask(talk(user(LONG * 3), thinking=False))
    if restart:
        running.restart()
    again = running.ask(talk(user(LONG * 3), first.message, user("And then?"), thinking=False))
    assert (again.source, again.reused) == ("disk-text" if restart else "thinking-visible", first.state)


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("blank", ["", " ", " \n"])
def test_blank_reasoning_may_come_back_in_any_way(keep, blank, restart):
    running = keep([" \n</think>Yes.", "Plan.</think>Fine."])
    first = running.ask(PI.conversation(user(LONG)))
    if restart:
        running.restart()
    message = Message("assistant", (Reasoning(blank), TextPart("Yes.")))
    reply = running.ask(PI.conversation(user(LONG), message, user("And?")))
    assert reply.reused == first.state


def test_a_saved_state_that_no_client_finds_is_no_reason_to_save_no_other(keep):
    answers = ["Plan. " * 170 + "</think>Yes.", "Plan.</think>Fine."]
    running = keep(answers, kv_cache_continued_interval_tokens=2000)
    first = running.ask(talk(user(LONG)))                       # saved at 2048, inside the reasoning
    assert first.prompt < 2048 < first.state < 2048 + 512
    running.ask(talk(user("Another conversation. " * 60)))
    reply = running.ask(talk(user(LONG), said("Yes."), user("And then?")))
    assert (reply.source, reply.reused) == ("disk-text", first.state)


class Drafting(StubEngine):
    """Gives two tokens a step, the first of them in the session already, as drafts that held do."""

    def decode(self, rows):
        first = super().decode(rows)
        more = [replace(row, token=steps[-1].token, generated=[*row.generated, steps[-1].token])
                for row, steps in zip(rows, first)]
        return [a + b for a, b in zip(first, super().decode(more))]


@pytest.mark.parametrize("limit", [None, 12, 13])
def test_drafts_that_were_not_taken_leave_the_state(keep, limit):
    for answer in ("Plan.</think>Even", "Plan.</think>Odd"):
        running = keep([answer, "Plan.</think>Fine."], engine=Drafting)
        first = running.ask(PI.conversation(user(LONG)), max_tokens=limit)
        ended = [BYTES.eos] if limit is None or first.said < limit else []
        assert running.tokens[first.prompt:] == BYTES.encode_marked(answer)[:limit] + ended
        assert running.ask(PI.conversation(user(LONG), first.message, user("And?"))).reused == first.state


def test_a_state_that_is_restored_again_and_again_without_progress_is_left_alone(keep):
    running = keep()
    first = running.ask(talk(user(LONG)))
    sources = []
    for _ in range(3):
        running.ask(talk(user("A title?")))                     # too short to be saved itself
        sources.append(follow(running, first).source)
    assert sources[:2] == ["disk-text", "disk-text"] and sources[2] != "disk-text"


class Watched(StubEngine):
    """Notes its steps, and what is read of its sessions for a save."""
    log: list[str]

    def open(self, context):
        session = super().open(context)
        snapshot = session.snapshot
        session.snapshot = lambda: WatchedSnapshot(snapshot(), self.log)
        return session

    def decode(self, rows):
        self.log.append("step")
        return super().decode(rows)


class WatchedSnapshot:
    def __init__(self, snapshot, log):
        self.tokens, self._snapshot, self._log = snapshot.tokens, snapshot, log

    def span(self, index):
        self._log.append("piece")
        return self._snapshot.span(index)

    def head(self, spans):
        self._log.append("piece")
        return self._snapshot.head(spans)


def test_a_save_during_decoding_is_exported_between_steps_a_piece_at_a_time(keep):
    Watched.log = log = []
    running = keep(["Plan.</think>" + "word " * 20], engine=Watched, kv_cache_cold_max_tokens=0,
                   kv_cache_continued_interval_tokens=8192)
    empty = running.prompt(talk(user("")))
    running.ask(talk(user("x" * (8192 - empty - 10))))          # the answer's tenth token is the 8192nd
    pieces = [i for i, what in enumerate(log) if what == "piece"]
    assert len(pieces) == 4 + 1 and running.store.stats().saved == 1
    assert all("step" in log[a:b] for a, b in zip(pieces, pieces[1:]))


def test_a_save_that_outlasts_its_answer_is_finished(keep):
    Watched.log = []
    running = keep(["Plan.</think>Yes."], engine=Watched, kv_cache_cold_max_tokens=0,
                   kv_cache_continued_interval_tokens=8192)
    empty = running.prompt(talk(user("")))
    running.ask(talk(user("x" * (8192 - empty - 8))))
    assert running.store.stats().saved == 1
