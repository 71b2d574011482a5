"""Segments: what only the renderer may place, and what is text."""
from ds4mlx.text.segments import CONTROL_LITERALS, DSML, THINK_OPEN, Control, Text, rendered_text, split_controls


def test_trusted_text_is_split_at_its_control_literals():
    assert split_controls(f"a<{DSML}b{THINK_OPEN}") == [Text("a<"), Control(DSML), Text("b"), Control(THINK_OPEN)]
    assert split_controls("") == [] and split_controls("plain") == [Text("plain")]


def test_rendered_text_is_what_was_split():
    text = "x".join(CONTROL_LITERALS) + "".join(CONTROL_LITERALS)
    assert rendered_text(split_controls(text)) == text
