"""`ds4mlx tokens`: ids and pieces of a text."""
import json
from io import BytesIO, TextIOWrapper

import pytest

from ds4mlx.cli.main import main
from ds4mlx.cli.tokens import escaped, listing
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.text.segments import ASSISTANT, BOS, CONTROL_LITERALS, THINK_OPEN, USER
from ds4mlx.text.tokenizer import BYTE_OF


@pytest.fixture
def vocabulary(tmp_path):
    """A GGUF file of a vocabulary whose ids are bytes, `ab` and the control tokens after them."""
    bytes_in_order = sorted(BYTE_OF, key=BYTE_OF.get)
    write_gguf(tmp_path / "bytes.gguf", {
        "general.name": "bytes 0731", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
        "tokenizer.ggml.tokens": [*bytes_in_order, "ab", *CONTROL_LITERALS], "tokenizer.ggml.merges": ["a b"]}, [])
    return tmp_path / "bytes.gguf"


@pytest.fixture
def tokens(vocabulary, capsys):
    """Run the command; returns its exit code and what it printed."""
    def run(*arguments):
        code = main(["tokens", "-m", str(vocabulary), *map(str, arguments)])
        return code, capsys.readouterr()
    return run


def test_the_first_line_is_all_ids_as_json_and_each_token_has_a_line(v4_tokenizer):
    ids = v4_tokenizer.encode_marked("</｜DSML｜parameter>\n")
    first, *rest = listing(v4_tokenizer, ids)
    assert json.loads(first) == ids
    assert rest == ["  1718  </", "128825  ｜DSML｜", " 41523  parameter", "  1018  >\\n"]


@pytest.mark.parametrize("piece, shown", [
    (b" a", " a"), ("中é".encode(), "中é"), (b"\n\t\x00\x1b", "\\n\\t\\x00\\x1b"), ("é".encode()[:1], "\\xc3"),
    (b"\\n", "\\\\n"), ("\u200d\u2028".encode(), "\\u200d\\u2028"), (b"\xff\xfe", "\\xff\\xfe")])
def test_a_piece_is_one_printable_line(piece, shown):
    assert escaped(piece) == shown


@pytest.mark.parametrize("arguments", [[], ["-p", "a", "--prompt-file", "b"], ["--prompt-f", "b"], ["-p"]])
def test_misuse_exits_with_2(arguments, ds4mlx):
    result = ds4mlx("tokens", *arguments)
    assert result.code == 2 and result.out == ""


def test_control_tokens_are_recognised_unless_literal(tokens):
    think = 257 + CONTROL_LITERALS.index("<think>")
    assert tokens("-p", "<think>")[1].out == f"[{think}]\n   {think}  <think>\n"
    assert tokens("-p", "<think>", "--literal")[1].out.startswith(f"{list(b'<think>')}\n    60  <\n")


def test_text_comes_from_a_file_or_from_standard_input(tokens, tmp_path, monkeypatch):
    (tmp_path / "text").write_text("中文\n")
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO("中文\n".encode())))
    from_file, from_stdin = tokens("--prompt-file", tmp_path / "text"), tokens("--prompt-file", "-")
    assert from_file == from_stdin and from_file[1].out.startswith(f"{list('中文'.encode()) + [10]}\n   228  \\xe4\n")


@pytest.mark.parametrize("content, message", [(None, "No such file"), (b"ab\xff", "byte 2 is not UTF-8")])
def test_text_that_cannot_be_read_exits_with_1(tokens, tmp_path, content, message):
    if content is not None:
        (tmp_path / "text").write_bytes(content)
    code, printed = tokens("--prompt-file", tmp_path / "text")
    assert code == 1 and printed.out == "" and message in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("source", ["--prompt-file", "--render"])
def test_a_source_without_end_is_not_read_to_it(tokens, source):
    code, printed = tokens(source, "/dev/zero")
    assert code == 1 and "larger than 64 MiB" in printed.err


def test_a_rendered_conversation_cannot_be_literal(tokens, tmp_path):
    (tmp_path / "messages.json").write_text('[{"role": "user", "content": "Hello"}]')
    code, printed = tokens("--render", tmp_path / "messages.json", "--literal")
    assert code == 2 and printed.out == "" and "--literal" in printed.err


@pytest.mark.parametrize("body", ['[{"role": "user", "content": "Hello"}]',
                                  '{"messages": [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]}'])
def test_a_conversation_is_rendered_as_the_server_does(tokens, tmp_path, body):
    (tmp_path / "messages.json").write_text(body)
    code, printed = tokens("--render", tmp_path / "messages.json")
    assert code == 0
    prompt, ids = printed.out.splitlines()
    assert prompt == BOS + USER + "Hello" + ASSISTANT + THINK_OPEN
    assert json.loads(ids)[2:7] == list(b"Hello") and len(json.loads(ids)) == 9


def test_the_effort_text_is_that_of_the_checkpoint(tokens, tmp_path):
    messages = '{"messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": "high"}'
    (tmp_path / "messages.json").write_text(messages)
    named = tokens("--render", tmp_path / "messages.json")[1].out
    preview = tokens("--render", tmp_path / "messages.json", "--effort-profile", "preview")[1].out
    assert "Reasoning Effort: Absolute maximum" in named and "Reasoning Effort" not in preview


def test_an_effort_that_the_context_has_no_room_for_is_lowered_as_by_the_server(tokens, tmp_path):
    def rendered(effort):
        request = {"messages": [{"role": "user", "content": "Hello"}], "reasoning_effort": effort}
        (tmp_path / "messages.json").write_text(json.dumps(request))
        return tokens("--render", tmp_path / "messages.json", "--effort-profile", "preview")[1].out
    assert rendered("max") == rendered("high")


@pytest.mark.parametrize("body", ["", "{", "[]", "{}", '[{"role": "critic", "content": "x"}]', "[" * 10_000, "7"])
def test_a_conversation_that_cannot_be_rendered_exits_with_1(tokens, tmp_path, body):
    (tmp_path / "messages.json").write_text(body)
    code, printed = tokens("--render", tmp_path / "messages.json")
    assert code == 1 and printed.out == "" and printed.err.startswith("ds4mlx tokens: ")
    assert printed.err.count("\n") == 1 and "internal error" not in printed.err
