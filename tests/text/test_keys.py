"""Keys of prompts tell real control tokens from quoted ones, whatever is quoted, and lead back into the prompt."""
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ds4mlx.chat.canonical import clean_text
from ds4mlx.text.keys import GrowingKey, after_key, key_with_ends, tokens_within
from ds4mlx.text.segments import ASSISTANT, CONTROL_LITERALS, DSML, EOS, THINK_OPEN, USER, Control, Text, Tokens
from ds4mlx.text.tokenizer import KEY_HINTS, KEY_QUOTED

LITERALS = [literal.encode() for literal in CONTROL_LITERALS]
QUOTED = ["｜DSML".encode() if literal == DSML else literal.encode() for literal in CONTROL_LITERALS]
HALVES = [half for literal in CONTROL_LITERALS for half in (literal[:len(literal) // 2], literal[len(literal) // 2:])]
LOOK_ALIKES = ["<|User|>", "<｜user｜>", "<｜User ｜>", "<think >", "</think", "｜DSML", "<dsml:", "<|EOT|>", "ÿ"]
TEXTS = st.lists(st.sampled_from([*CONTROL_LITERALS, *HALVES, *LOOK_ALIKES, "a", " 中", "\n"])
                 | st.text(max_size=2).map(clean_text), max_size=4).map("".join)
RAW_FF = 190  # the token that is the byte 0xFF
IDS = st.lists(st.integers(0, 129279) | st.sampled_from([RAW_FF, 30, 0, 1, 128803, 128821, 128825]), max_size=4)
SEGMENTS = st.lists(TEXTS.map(Text) | st.sampled_from(CONTROL_LITERALS).map(Control)
                    | IDS.map(lambda ids: Tokens(tuple(ids), "")), max_size=8)
CONVERSATIONS = st.lists(TEXTS.map(Text) | st.sampled_from(CONTROL_LITERALS).map(Control), max_size=8)


def read(key):
    """What a key says, by its own grammar: bytes, and control literals as Control."""
    said, at = [], 0
    while at < len(key):
        literal = next((x for x in LITERALS if key.startswith(x, at)), None)
        if key[at] == 0xFF:
            quoted = next((x for x in QUOTED if key.startswith(x, at + 1)), b"\xff")
            assert key.startswith(quoted, at + 1)
            said.append(quoted[:1])
            at += 2
        else:
            said.append(Control(literal.decode()) if literal else key[at:at + 1])
            at += len(literal) if literal else 1
    return joined(said)


def joined(said):
    result = []
    for piece in said:
        if isinstance(piece, bytes) and result and isinstance(result[-1], bytes):
            result[-1] += piece
        elif piece:
            result.append(piece)
    return result


def meaning(tokenizer, ids):
    return joined([tokenizer.token_bytes(i) if tokenizer.literal(i) is None else Control(tokenizer.literal(i))
                   for i in ids])


def test_the_byte_of_the_mark_has_a_token(v4_tokenizer):
    assert v4_tokenizer.token_bytes(RAW_FF) == b"\xff"


@settings(max_examples=300)
@given(segments=CONVERSATIONS)
def test_equal_tokens_have_one_key_however_they_were_rendered(v4_tokenizer, segments):
    assert v4_tokenizer.key_bytes(segments) == v4_tokenizer.key_bytes_of_ids(v4_tokenizer.encode(segments))


@settings(max_examples=300)
@given(segments=SEGMENTS)
def test_replayed_tokens_have_the_key_of_their_ids(v4_tokenizer, segments):
    assert v4_tokenizer.key_bytes(segments) == v4_tokenizer.key_bytes_of_ids(v4_tokenizer.encode(segments))


@settings(max_examples=300)
@given(segments=SEGMENTS)
@example(segments=[Text("｜DSML｜DSML｜")])
@example(segments=[Text("｜DSML"), Control(DSML), Text("DSML｜")])
def test_a_key_tells_quoted_control_tokens_from_real_ones(v4_tokenizer, segments):
    ids = v4_tokenizer.encode(segments)
    assert read(v4_tokenizer.key_bytes_of_ids(ids)) == meaning(v4_tokenizer, ids)


def test_an_overlap_of_quoted_and_real_is_read_one_way(v4_tokenizer):
    before, behind = [Text("｜DSML"), Control(DSML)], [Control(DSML), Text("DSML｜")]
    assert v4_tokenizer.key_bytes(before) != v4_tokenizer.key_bytes(behind)


@pytest.mark.parametrize("literal", CONTROL_LITERALS)
def test_a_sampled_0xff_makes_no_quotation_of_a_control_token(literal, v4_tokenizer):
    real = v4_tokenizer.key_bytes([Tokens((RAW_FF,), "\ufffd"), Control(literal)])
    assert real == b"\xff\xff" + literal.encode() != v4_tokenizer.key_bytes([Text(literal)])


def test_keys_of_plain_conversations_are_their_text(v4_tokenizer):
    segments = [Control(USER), Text("ÿ 中 <|User|>"), Control(EOS)]
    assert v4_tokenizer.key_bytes(segments) == f"{USER}ÿ 中 <|User|>{EOS}".encode()


@settings(max_examples=300)
@given(segments=SEGMENTS, data=st.data())
def test_what_follows_a_place_completes_the_prompt(v4_tokenizer, segments, data):
    key = v4_tokenizer.key_bytes(segments)
    offset = data.draw(st.integers(0, len(key)))
    try:
        rest = after_key(v4_tokenizer, segments, offset)
    except ValueError:
        return
    assert key[:offset] + v4_tokenizer.key_bytes(rest) == key


@settings(max_examples=200)
@given(segments=SEGMENTS)
def test_each_end_of_a_segment_is_a_place_to_go_on_from(v4_tokenizer, segments):
    key, ends = key_with_ends(v4_tokenizer, segments)
    assert key == v4_tokenizer.key_bytes(segments)
    assert len(ends) == len(segments) and (not ends or ends[-1] == len(v4_tokenizer.key_bytes(segments)))
    for count, end in enumerate(ends, 1):
        rest = v4_tokenizer.encode(after_key(v4_tokenizer, segments, end))
        assert meaning(v4_tokenizer, rest) == meaning(v4_tokenizer, v4_tokenizer.encode(segments[count:]))


def test_replayed_tokens_after_a_place_stay_as_sampled(v4_tokenizer):
    odd = tuple(token for character in "tool_calls" for token in v4_tokenizer.encode_literal(character))
    segments = [Control(USER), Text("Q: 中"), Tokens((*odd, v4_tokenizer.control[DSML], *odd), "")]
    after = after_key(v4_tokenizer, segments, len(USER.encode()) + 3)
    assert after == [Text("中"), segments[-1]]
    deep = len(f"{USER}Q: 中tool".encode())
    assert after_key(v4_tokenizer, segments, deep)[0].ids == segments[-1].ids[4:]


@pytest.mark.parametrize("segments, offset", [
    ([Control(USER)], 3), ([Text("中")], 1), ([Text("a<think>")], 2), ([Tokens((128821,), THINK_OPEN)], 4)])
def test_nothing_goes_on_from_inside_a_token(segments, offset, v4_tokenizer):
    with pytest.raises(ValueError):
        after_key(v4_tokenizer, segments, offset)


@given(segments=SEGMENTS, cuts=st.lists(st.integers(0, 100), max_size=6))
def test_a_growing_key_is_the_key_of_its_ids_wherever_it_is_asked(v4_tokenizer, segments, cuts):
    ids, growing = v4_tokenizer.encode(segments), GrowingKey(v4_tokenizer)
    for cut in (*sorted(cuts), len(ids), *cuts):
        assert growing.of(ids[:cut]) == v4_tokenizer.key_bytes_of_ids(ids[:cut])


def test_a_growing_key_spells_a_line_once(v4_tokenizer, monkeypatch):
    line, spelled = v4_tokenizer.encode_literal("A line of text.\n"), []
    growing, ids = GrowingKey(v4_tokenizer), line * 100
    growing.of(ids)
    spell = v4_tokenizer.key_bytes_of_ids
    monkeypatch.setattr(v4_tokenizer, "key_bytes_of_ids", lambda ids: spelled.append(len(ids)) or spell(ids))
    growing.of([*ids, *line])
    assert sum(spelled) <= 2 * len(line)


def test_the_tokens_within_a_beginning_of_a_key_are_whole(v4_tokenizer):
    ids = v4_tokenizer.encode([Control(USER), Text("one, zwei, 三."), Control(ASSISTANT)])
    for n in range(1, len(ids) + 1):
        end = len(v4_tokenizer.key_bytes_of_ids(ids[:n]))
        assert tokens_within(v4_tokenizer, ids, end) == n and tokens_within(v4_tokenizer, ids, end - 1) == n - 1


def test_all_that_takes_a_mark_holds_what_is_looked_for_first():
    assert all(any(hint in quoted for hint in KEY_HINTS) for quoted in (*KEY_QUOTED, b"\xff"))
