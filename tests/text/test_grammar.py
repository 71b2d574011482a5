"""Grammars over the V4 vocabulary: which tokens may come next."""
import json

import numpy as np
import pytest

from ds4mlx.errors import BadRequest
from ds4mlx.text.grammar import MAX_DIGITS, Vocabulary
from ds4mlx.text.segments import DSML


@pytest.fixture(scope="session")
def vocabulary(v4_tokenizer):
    return Vocabulary(v4_tokenizer)


def schema_grammar(vocabulary, schema):
    return vocabulary.compile(f"start: %json {json.dumps(schema)}", "schema")


def takes(grammar, ids):
    """Whether the masks let all of these tokens pass."""
    for token in ids:
        if not grammar.mask()[token]:
            return False
        grammar.accept(token)
    return True


@pytest.mark.parametrize(("text", "allowed"), [
    ('{"n":1}', True), ('{"n": 1, "s": "a<b>\\n\u4e2d"}', True), ('{"n":"1"}', False), ('{"m":1}', False),
    ("[1]", False)])
def test_json_of_a_schema_passes_and_other_json_does_not(vocabulary, v4_tokenizer, text, allowed):
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}},
              "required": ["n"], "additionalProperties": False}
    assert takes(schema_grammar(vocabulary, schema), v4_tokenizer.encode_literal(text)) is allowed


def test_a_complete_text_may_end_and_an_incomplete_one_may_not(vocabulary, v4_tokenizer):
    grammar = schema_grammar(vocabulary, {"type": "array", "items": {"type": "integer"}})
    assert takes(grammar, v4_tokenizer.encode_literal("[1,2")) and not grammar.mask()[v4_tokenizer.eos]
    assert takes(grammar, v4_tokenizer.encode_literal("]")) and grammar.mask()[v4_tokenizer.eos]
    assert grammar.done and grammar.mask().sum() == 1


def test_inside_a_string_every_other_text_token_may_come_and_no_control_token(vocabulary, v4_tokenizer):
    grammar = schema_grammar(vocabulary, {"type": "string"})
    assert takes(grammar, v4_tokenizer.encode_literal('"'))
    allowed = set(np.flatnonzero(grammar.mask()).tolist())
    assert len(allowed) > 100_000 and allowed <= v4_tokenizer.text_ids


def test_a_control_token_may_come_where_the_grammar_names_it_and_its_characters_may_not(vocabulary, v4_tokenizer):
    def grammar():
        return vocabulary.compile('start: "<" dsml ("a" | "b")', "x")

    assert takes(grammar(), v4_tokenizer.encode_marked(f"<{DSML}a"))
    assert not takes(grammar(), v4_tokenizer.encode_literal(f"<{DSML}a"))


def test_text_that_is_certain_is_spelled_as_the_tokenizer_spells_it(vocabulary, v4_tokenizer):
    text = "\n\n<tool_calls>\n<invoke name=\"get_weather\">\n"
    grammar, spelled = vocabulary.compile(f"start: {json.dumps(text)} /[0-9]/", "x"), []
    while (mask := grammar.mask()).sum() == 1:
        spelled.append(int(np.argmax(mask)))
        grammar.accept(spelled[-1])
    assert spelled == v4_tokenizer.encode_literal(text)[:len(spelled)] and len(spelled) > 8


@pytest.mark.parametrize("begun", ["-3", "0.", "1e"])
def test_a_number_ends_though_a_model_would_go_on_with_digits_for_ever(vocabulary, v4_tokenizer, begun):
    grammar, (seven,) = schema_grammar(vocabulary, {"type": "number"}), v4_tokenizer.encode_literal("7")
    assert takes(grammar, v4_tokenizer.encode_literal(begun))
    count = 0
    while (mask := grammar.mask())[seven] and count < 100:
        grammar.accept(seven)
        count += 1
    assert MAX_DIGITS - 1 <= count <= MAX_DIGITS and mask[v4_tokenizer.eos]


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "pattern": "^[0-9]{60}$"}])
def test_digits_of_a_string_are_as_many_as_it_has(vocabulary, v4_tokenizer, schema):
    assert takes(schema_grammar(vocabulary, schema), v4_tokenizer.encode_literal('"' + "7" * 60 + '"'))


def test_a_text_that_is_there_already_is_gone_on_from(vocabulary, v4_tokenizer):
    grammar = schema_grammar(vocabulary, {"enum": ["abc", "abd"]})
    grammar.skip(v4_tokenizer.encode_literal('"ab'))
    assert takes(grammar, v4_tokenizer.encode_literal('d"')) and grammar.done
    with pytest.raises(BadRequest):
        schema_grammar(vocabulary, {"enum": ["abc"]}).skip(v4_tokenizer.encode_literal("[1"))


def test_logits_without_a_token_are_never_allowed(v4_tokenizer):
    grammar = Vocabulary(v4_tokenizer, v4_tokenizer.vocab_size + 64).compile("start: /(?s:.*)/", "x")
    mask = grammar.mask()
    assert len(mask) == v4_tokenizer.vocab_size + 64 and not mask[v4_tokenizer.vocab_size:].any()


def test_a_pattern_that_gets_too_costly_is_given_up_on_the_way(vocabulary, v4_tokenizer):
    grammar = schema_grammar(vocabulary, {"type": "string", "pattern": "(.*a.{30}){8}"})
    with pytest.raises(BadRequest, match="schema: the answer cannot be held to the schema .*too many"):
        takes(grammar, v4_tokenizer.encode_literal('"' + "ab" * 200))


HOSTILE = {
    "doubling": {"allOf": [{"anyOf": [{"type": "object", "properties": {f"a{i}_{j}": {"type": "integer"}}}
                                      for j in range(6)]} for i in range(8)]},
    "itself": {"$defs": {"n": {"$ref": "#/$defs/n"}}, "$ref": "#/$defs/n"},
    "many properties": {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(5000)}},
    "many values": {"enum": [f"v{i:06}" for i in range(100_000)]},
    "huge": {"enum": ["x" * 1_000_000]},
    "multiples": {"type": "integer", "multipleOf": 99991, "minimum": 7, "maximum": 10**18},
    "nothing": {"enum": []},
    "not supported": {"type": "array", "uniqueItems": True},
    "not a schema": {"type": 5},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_a_schema_that_is_too_much_or_cannot_be_kept_is_refused(vocabulary, schema):
    with pytest.raises(BadRequest, match="^schema: ") as refusal:
        schema_grammar(vocabulary, schema)
    assert (refusal.value.status, refusal.value.code, refusal.value.param) == (400, "invalid_schema", "schema")
