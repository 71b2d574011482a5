"""What an answer is held to, step by step: a response format, a call that must come, the schemas of strict tools.

    reasoning: free, but it must be closed where a format or a call is due
    text:      a response format or a block of calls, where one is asked for, from the first token on
    block:     calls of declared tools, from the mark `<｜DSML｜` on, where one of them is strict

A block inside of reasoning, or spelled without the mark, cannot be held to anything, as it may be a quotation: a strict
tool's call in it counts if it keeps to its schema all the same (`fits`).
"""
from collections.abc import Sequence

import numpy as np

from ds4mlx.chat import json_text
from ds4mlx.chat.messages import Conversation, TextPart, Tool
from ds4mlx.chat.syntax.grammars import answer_grammar, arguments_grammar, block_grammar
from ds4mlx.chat.syntax.schemas import in_schema_order
from ds4mlx.text.grammar import Grammar, Vocabulary
from ds4mlx.text.segments import DSML, EOS, Control


class Constraint:
    """Of one answer. mask(), then accept() of the token that was sampled, both told whether it is one of reasoning."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary, tools: Sequence[Tool] = (), *, at_block: bool) -> None:
        """at_block: the grammar is that of a block that the model opens if it likes, not of the whole text."""
        self._grammar, self._at_block, self._vocabulary = grammar, at_block, vocabulary
        self._strict = {tool.name: tool for tool in tools if tool.strict}
        self._all_but_eos = None if at_block else vocabulary.all_but_eos()
        self._active = False
        self._before_mark = False     # a mark that comes next opens a block

    def mask(self, in_reasoning: bool) -> np.ndarray | None:
        """bool [vocab], True for the tokens that may come next; None: all."""
        if in_reasoning:
            return self._all_but_eos
        self._active = self._active or not self._at_block
        return self._grammar.mask() if self._active else None

    def accept(self, token: int, piece: bytes | Control, in_reasoning: bool) -> None:
        if in_reasoning or piece == Control(EOS):
            return
        if self._active:
            self._grammar.accept(token)
        elif piece == Control(DSML):
            self._active = self._before_mark
        self._before_mark = isinstance(piece, bytes) and piece.endswith(b"<")

    def fits(self, name: str, arguments: str) -> bool:
        """Whether a call that nothing held keeps to the schema of its tool, if that is strict."""
        tool = self._strict.get(name)
        if tool is None:
            return True
        schema = tool.schema.get("parameters")
        try:
            text = json_text.spell(in_schema_order(json_text.parse(arguments), schema, schema))
        except (ValueError, RecursionError):
            return False
        return self._vocabulary.matches(arguments_grammar(tool), text)


def is_free(conversation: Conversation) -> bool:
    """Whether nothing holds the answer."""
    strict = not conversation.tools_banned and any(tool.strict for tool in conversation.tools)
    return conversation.response_format is None and not conversation.must_call and not strict


def constraint_of(conversation: Conversation, vocabulary: Vocabulary) -> Constraint | None:
    """None where the answer is free. Raises BadRequest for schemas that no answer can be held to."""
    if is_free(conversation):
        return None
    tools = () if conversation.tools_banned else conversation.tools
    form, must_call = conversation.response_format, conversation.must_call
    if form is None and not must_call:
        return Constraint(vocabulary.compile(block_grammar(tools), "tools"), vocabulary, tools, at_block=True)
    names = must_call or tuple(tool.name for tool in tools)
    source = answer_grammar(form, tools, names, must_call=bool(must_call))
    grammar = vocabulary.compile(source, "tools" if must_call or form is None else "response_format")
    last = conversation.messages[-1]
    if conversation.continue_final and last.role == "assistant" and not must_call:
        begun = "".join(part.text for part in last.parts if isinstance(part, TextPart))
        grammar.skip(vocabulary.tokenizer.encode_literal(begun))
    return Constraint(grammar, vocabulary, tools, at_block=False)
