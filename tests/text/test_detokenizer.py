"""Streaming ids back to text."""
from hypothesis import given
from hypothesis import strategies as st

from ds4mlx.text.stream import Detokenizer


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text("👩\u200d💻한é中\ufffd"))
def test_pieces_join_to_the_text_and_never_hold_half_a_character(v4_tokenizer, text):
    stream = Detokenizer(v4_tokenizer)
    pieces = [stream.push(token) for token in v4_tokenizer.encode_literal(text)]
    assert "".join(pieces) == text and stream.finish() == ""


@given(ids=st.lists(st.integers(0, 129279), max_size=8))
def test_any_ids_give_the_text_of_decoding_them_at_once(v4_tokenizer, ids):
    stream = Detokenizer(v4_tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == v4_tokenizer.decode(ids)


def test_an_unfinished_character_becomes_one_replacement_character(v4_tokenizer):
    stream = Detokenizer(v4_tokenizer)
    first, *rest = v4_tokenizer.encode_literal("👩")
    assert rest and stream.push(first) == ""
    assert stream.finish() == "\ufffd" and stream.finish() == ""


def test_a_character_appears_with_its_last_token(v4_tokenizer):
    stream = Detokenizer(v4_tokenizer)
    ids = v4_tokenizer.encode_literal("𓀀")  # hieroglyph: four bytes that no merge joins
    assert len(ids) > 1 and [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["𓀀"]
