"""The incremental reader against a slow, obvious one that sees the whole answer at once.

The slow reader works on one string in which \\ue000 stands for the DSML token and \\ue001 for the token </think>.
"""
import html
import json
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from ds4mlx.chat.events import Recovered, gather
from ds4mlx.chat.stream import AnswerStream
from ds4mlx.text.segments import DSML, THINK_CLOSE, Control

D, T = "\ue000", "\ue001"
TOOLS = ("bash", "read")
W = r"[ \t\n\r\f\v]"
STARTS = {f"<{mark}tool_calls>": mark for mark in (D, DSML, "DSML｜", f"｜{DSML}｜", f"｜{D}｜", "")}


class Broken(Exception):
    """No block: `tag` is where the blanks before the failing tag begin, `end` is after the failing character."""

    def __init__(self, tag: int, end: int) -> None:
        super().__init__(tag, end)
        self.tag, self.end = tag, end


class SlowBlock:
    """Recursive descent over the whole text, from right after the start marker."""

    def __init__(self, text, at, mark, declared):
        self.text, self.at, self.mark, self.declared = text, at, mark, declared
        self.calls, self.headers = [], 0

    def block(self):
        while True:
            start = self.at
            name = self.tag("invoke", "tool_calls")
            if name is None and self.calls:
                return
            if not name or (self.declared and name[0] not in self.declared):
                raise Broken(start, self.at)
            self.headers += 1
            self.calls.append((name[0], self.parameters("invoke")))

    def parameters(self, parent):
        values = {}
        while True:
            found = self.tag("parameter", parent)
            if found is None:
                return values
            values.setdefault(found[0], self.value(found[1]))
            values = {key: values[key] for key in values}

    def value(self, string):
        if string is None and re.compile(f"{W}*<{self.mark}parameter{W}").match(self.text, self.at):
            return self.parameters("parameter")
        closing = f"</{self.mark}parameter>"
        end = self.text.find(closing, self.at)
        if end < 0:
            raise Broken(len(self.text), len(self.text))
        body, self.at = spell(self.text[self.at:end]), end + len(closing)
        if string == "false":
            try:
                return json.loads(body)
            except ValueError:
                pass
        return re.sub("&(lt|gt|amp|quot|apos);", lambda entity: html.unescape(entity[0]), body)

    def tag(self, opening, closing):
        """(name, string) of the opening tag that stands here, or None for the closing one."""
        start = self.at
        quoted = """("[^"<]*"|'[^'<]*')"""
        tag = re.compile(f"{W}*<(?:(/){self.mark}{closing}|{self.mark}{opening}"
                         f"((?:{W}+[a-z]+={quoted})*)){W}*>").match(self.text, start)
        if not tag:
            raise Broken(start, self.longest_start(start, opening, closing))
        self.at = tag.end()
        if tag[1]:
            return None
        attributes = dict(reversed(re.findall(r"""([a-z]+)=["']([^"']*)""", tag[2])))
        if not attributes.get("name"):
            raise Broken(start, self.at)
        return attributes["name"], attributes.get("string")

    def longest_start(self, start, opening, closing):
        """Right after the first character with which no tag can begin any more."""
        heads = (f"<{self.mark}{opening}", f"</{self.mark}{closing}")
        for end in range(start + 1, len(self.text) + 1):
            so_far = self.text[start:end].lstrip(" \t\n\r\f\v")
            head = next((head for head in heads if so_far.startswith(head)), None)
            if head is None and any(head.startswith(so_far) for head in heads):
                continue
            unquoted = re.sub("\"[^\"]*(\"|$)|'[^']*('|$)", "", so_far[len(head or ""):])
            if head is None or "<" in so_far[1:] or ">" in unquoted:
                return end
        return len(self.text)


def spell(text):
    return text.replace(D, DSML).replace(T, THINK_CLOSE)


def slow(text, thinking):
    """(reasoning, content, calls, finish reason, recovered) of an answer that ends with EOS."""
    reasoning, at = "", 0
    while thinking:
        found = re.compile(f"{T}|{THINK_CLOSE}|<{D}tool_calls>").search(text, at)
        if not found:
            return spell(text), "", [], "stop", False
        if found[0][-1] != ">" or found[0] == THINK_CLOSE:
            reasoning, text, thinking, at = text[:found.start()], text[found.end():], False, 0
            continue
        end_of_thinking = text.find(T, found.end())
        block = SlowBlock(text[:end_of_thinking] if end_of_thinking >= 0 else text, found.end(), D, TOOLS)
        try:
            block.block()
            if not text[block.at:].strip(" \t\n\r\f\v"):
                return spell(text[:found.start()].rstrip(" \t\n\r\f\v")), "", block.calls, "tool_calls", False
            at = block.at
        except Broken as broken:
            at = broken.tag
    return spell(reasoning), *slow_text(text)


def slow_text(text):
    at = 0
    while found := re.compile("|".join(map(re.escape, STARTS))).search(text, at):
        mark = STARTS[found[0]]
        content = text[:found.start()].rstrip(" \t\n\r\f\v")
        token = text.find(D, found.end()) if D not in mark else -1
        visible = text[:token] if token >= 0 else text
        block = SlowBlock(visible, found.end(), mark, None if mark == D else TOOLS)
        try:
            block.block()
            return spell(content), block.calls, "tool_calls", False
        except Broken as broken:
            if mark != D:
                at = min(broken.tag, token - visible.endswith("<")) if token >= 0 else broken.tag
            elif block.calls:
                return spell(content), block.calls, "tool_calls", False
            elif block.headers:
                return spell(content), [], "error", False
            else:
                return spell(text[:broken.end]), [], "stop", True
    return spell(text), [], "stop", False


def fast(pieces, thinking):
    stream = AnswerStream(thinking=thinking, tools=TOOLS)
    events = [event for piece in pieces if not stream.done for event in stream.push(piece)] + stream.finish("stop")
    answer = gather(events)
    calls = [(name, json.loads(arguments)) for name, arguments in answer.calls]
    recovered = any(isinstance(event, Recovered) for event in events)
    return answer.reasoning, answer.content, calls, stream.finish_reason, recovered


def cut(text, cuts):
    """The text as tokens: control tokens alone, the bytes between them cut at the given offsets."""
    for part in re.split(f"([{D}{T}])", text):
        if part in (D, T):
            yield Control(DSML if part == D else THINK_CLOSE)
        elif part:
            raw = part.encode()
            edges = sorted({0, len(raw), *(at % len(raw) for at in cuts)})
            yield from (raw[a:b] for a, b in zip(edges, edges[1:]))


ELEMENTS = [
    "a", " ", "\n", "\n\n", "<", ">", "</", "中文", "😀", "&lt;", "&am", "p;", '"', "'", T, THINK_CLOSE, "</thi", D, DSML,
    "12", '{"k": "v<"}', "[1, ", "tool_calls>", "<tool_calls>", f"<{D}tool_calls>", "<DSML｜tool_calls>",
    f"<｜{D}｜tool_calls>", '<invoke name="bash">', f'<{D}invoke name="bash">', f'<{D}invoke name="rm">',
    f'<{D}invoke string="x" name=\'read\' >', f"<{D}invoke>", f'<{D}parameter name="x" string="true">',
    f'<{D}parameter string="false" name="y">', f'<{D}parameter name="z">', f"</{D}parameter>", f"</{D}invoke>",
    f"</{D}tool_calls>", f"</{D}tool_calls >", "</invoke>", "</tool_calls>", "</parameter>",
]
BODIES = st.lists(st.sampled_from(["a", "<", "</", "&lt;", "&am", "中", " ", "\n", "1", "[", "]", '"', D, f"</{D}par"]),
                  max_size=6).map("".join)


@st.composite
def blocks(draw):
    """The elements of a well-formed block, in one of the spellings."""
    mark = draw(st.sampled_from(sorted(STARTS.values())))
    parts = [draw(st.sampled_from(["", "\n\n", " ", "text\n"])), f"<{mark}tool_calls>"]
    for _ in range(draw(st.integers(1, 3))):
        parts += ["\n", f'<{mark}invoke name="{draw(st.sampled_from(["bash", "read", "rm"]))}">', "\n"]
        for _ in range(draw(st.integers(0, 3))):
            string = draw(st.sampled_from(["", ' string="true"', ' string="false"']))
            parts += [f'<{mark}parameter name="{draw(st.sampled_from("xyz"))}"{string}>']
            if not string and draw(st.booleans()):
                parts += ["\n", f'<{mark}parameter name="n" string="true">', draw(BODIES), f"</{mark}parameter>"]
            else:
                parts += [draw(BODIES)]
            parts += [f"</{mark}parameter>", "\n"]
        parts += [f"</{mark}invoke>"]
    return [*parts, "\n", f"</{mark}tool_calls>"]


@st.composite
def answers(draw):
    """Blocks among other text, with some elements lost, repeated, or put where they do not belong."""
    parts = draw(st.lists(st.sampled_from(ELEMENTS), max_size=6))
    for _ in range(draw(st.integers(0, 2))):
        parts += draw(blocks()) + draw(st.lists(st.sampled_from(ELEMENTS), max_size=3))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(parts)))
        parts[at:at + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(ELEMENTS), max_size=2))
    return "".join(parts)


@settings(max_examples=250)
@given(answers(), st.booleans(), st.lists(st.integers(0, 1000), max_size=12))
def test_the_reader_agrees_with_the_slow_one_however_tokens_are_cut(text, thinking, cuts):
    assert fast(cut(text, cuts), thinking) == slow(text, thinking)


@settings(max_examples=80)
@given(answers(), st.booleans())
def test_the_reader_agrees_with_the_slow_one_byte_by_byte(text, thinking):
    assert fast(cut(text, range(1000)), thinking) == slow(text, thinking)


@settings(max_examples=80)
@given(answers(), st.booleans())
def test_the_region_depends_on_the_bytes_so_far_alone(text, thinking):
    whole, single = (AnswerStream(thinking=thinking, tools=TOOLS) for _ in range(2))
    for token in cut(text, [7, 20, 31, 55]):
        whole.push(token)
        for part in [bytes([byte]) for byte in token] if isinstance(token, bytes) else [token]:
            single.push(part)
        assert (whole.region, whole.done, whole.masks_eos) == (single.region, single.done, single.masks_eos)
