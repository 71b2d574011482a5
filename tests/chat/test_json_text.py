"""JSON that keeps what its author wrote."""
import pytest

from ds4mlx.chat.json_text import parse, spell


@pytest.mark.parametrize("json, spelled", [
    ('{"a":1,"b":[1,2]}', '{"a": 1, "b": [1, 2]}'), ("[1e3,1.50,-0,1E+2]", "[1e3, 1.50, -0, 1E+2]"),
    ("12345678901234567890", "12345678901234567890"), ("1" * 5000, "1" * 5000), ('"\\u4e2d\\/\\n"', '"中/\\n"'),
    ('{"b":{},"a":[],"c":null,"d":true}', '{"b": {}, "a": [], "c": null, "d": true}')])
def test_json_keeps_order_and_numbers_and_gets_the_models_spacing(json, spelled):
    assert spell(parse(json)) == spelled
    assert spell(parse(spelled)) == spelled


@pytest.mark.parametrize("text", ["", "NaN", "[Infinity]", "{'a': 1}", "1 2"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ValueError):
        parse(text)
