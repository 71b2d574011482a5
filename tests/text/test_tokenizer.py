"""The tokenizer against the public V4 tokenizer, and the rule that text never becomes a control token."""
import json
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ds4mlx.chat.canonical import clean_text
from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.reader import GGUF
from ds4mlx.gguf.writer import write_gguf
from ds4mlx.text.segments import CONTROL_LITERALS, DSML, THINK_CLOSE, THINK_OPEN, USER, Control, Text, Tokens
from ds4mlx.text.tokenizer import Tokenizer

PYTHON = 'def f(x: int = 3) -> str:\n    """doc"""\n\n    return f"{x!r:>10}"  # why\n\n\nclass A:\n\tpass\n'
C = '#include <stdio.h>\nint main(void) {\n\tfor (int i=0; i<10; ++i) printf("%d\\n", a[i]->b);\n\treturn 0;\n}\n'
MARKUP = "<html><body class='x'>a &amp; b</body></html>\n```json\n{\"k\": [1, 2.5e-3, null]}\n```\n| a | b |\n|---|---|"
CORPUS = {
    "python": PYTHON, "c": C, "markup": MARKUP, "shell": "$ ls -la | grep '^d' && echo \"$HOME\" >> /tmp/x.log 2>&1",
    "chinese": "中文字符，测试。深度求索公司创造了该助手！２０２６年", "japanese": "ひらがなとカタカナ、ー長音と漢字の混在テキスト。",
    "korean": "안녕하세요, 한국어 문장입니다.", "arabic": "مرحبا بالعالم، هذا نص عربي ١٢٣", "thai": "สวัสดีชาวโลก ภาษาไทย",
    "hindi": "नमस्ते दुनिया क्षत्रिय", "combining": "e\u0301 a\u0308\u0323 n\u0303o Z\u0351\u036b\u0343\u036a",
    "emoji": "👩‍👩‍👧‍👦 👍🏽 🇮🇹 ✨ 1️⃣ ❤️", "spaces": "a  b   c    d          e \u00a0 \u3000 \u200b f",
    "whitespace": "\t\tx\t \n \n\n  \r\n\r\n\r \n   y   \n",
    "digits": "1 12 123 1234 12345678901234567890 3.14159 1,000,000 0x1F ½ ²",
    "punctuation": "!!! ... ?!?! --- === ((([[[{{{ }}} ]]] ))) «» “quotes” … ¿¡ $€£ @#%^&*~`",
    "apostrophes": "don't I'LL we've 'tis o'clock",
    "look-alikes": "<think <|User|> <｜User| ｜DSML |DSML| think> <｜begin_of_sentence｜>",
    "latin": "Straße Ærø naïve İstanbul ŁÓDŹ",
    "surrogates": clean_text("lone \ud83d here, \udc00\udc01 there"),
    "controls": "\x00\x01\x1b[31mred\x7f\x85\u2028", "empty": "",
}


@pytest.fixture(scope="session")
def official(v4_tokenizer_json):
    return tokenizers.Tokenizer.from_file(str(v4_tokenizer_json))


@pytest.fixture(scope="session")
def gguf_metadata(v4_tokenizer_json):
    data = json.loads(v4_tokenizer_json.read_bytes())
    spelling = {i: token for token, i in data["model"]["vocab"].items()}
    spelling |= {entry["id"]: entry["content"] for entry in data["added_tokens"]}
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "joyai-llm",
            "tokenizer.ggml.tokens": [spelling[i] for i in range(len(spelling))],
            "tokenizer.ggml.merges": data["model"]["merges"]}


@pytest.fixture(scope="session")
def from_gguf(gguf_metadata):
    return Tokenizer.from_gguf(gguf_metadata)


def ids(official, text):
    return official.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("text", CORPUS.values(), ids=CORPUS.keys())
def test_ids_are_those_of_the_public_tokenizer(from_gguf, official, text):
    assert from_gguf.encode_literal(text) == ids(official, text)
    assert from_gguf.decode(from_gguf.encode_literal(text)) == text


MIXED = "aA é中あ한ـ\u0301👍🏽\u200d0٣'\"<|/>-.\n\r\t  \u00a0"


@given(text=st.text(st.characters(exclude_categories=["Cs"])) | st.text(MIXED))
def test_any_text_has_the_ids_of_the_public_tokenizer(from_gguf, official, text):
    assume(not any(added.content in text for added in official.get_added_tokens_decoder().values()))
    assert from_gguf.encode_literal(text) == ids(official, text)
    assert from_gguf.decode(from_gguf.encode_literal(text)) == text


def test_gguf_and_json_give_the_same_tokenizer(from_gguf, v4_tokenizer):
    assert from_gguf.fingerprint() == v4_tokenizer.fingerprint()
    assert from_gguf.control == v4_tokenizer.control


def test_a_vocabulary_survives_a_gguf_file(gguf_metadata, from_gguf, tmp_path):
    write_gguf(tmp_path / "vocabulary.gguf", gguf_metadata, [])
    with GGUF.open(tmp_path / "vocabulary.gguf") as file:
        assert Tokenizer.from_gguf(file.metadata).fingerprint() == from_gguf.fingerprint()


def test_the_fingerprint_tells_another_vocabulary(gguf_metadata, from_gguf):
    tokens = list(gguf_metadata["tokenizer.ggml.tokens"])
    tokens[1000], tokens[1001] = tokens[1001], tokens[1000]
    other = Tokenizer.from_gguf(gguf_metadata | {"tokenizer.ggml.tokens": tokens})
    assert other.fingerprint() != from_gguf.fingerprint()


def test_loading_takes_under_two_seconds(gguf_metadata):
    start = time.process_time()  # of this process alone: 0.6 s measured
    Tokenizer.from_gguf(gguf_metadata)
    assert time.process_time() - start < 2


def test_control_tokens_have_their_ids(v4_tokenizer):
    known = {"<｜begin▁of▁sentence｜>": 0, "<｜end▁of▁sentence｜>": 1, USER: 128803, "<｜Assistant｜>": 128804,
             THINK_OPEN: 128821, THINK_CLOSE: 128822, DSML: 128825, "<｜latest_reminder｜>": 128828, "<｜action｜>": 128829,
             "<｜query｜>": 128830, "<｜authority｜>": 128831, "<｜domain｜>": 128832, "<｜title｜>": 128836,
             "<｜read_url｜>": 128845}
    assert v4_tokenizer.control == known and v4_tokenizer.control_ids == set(known.values())
    assert (v4_tokenizer.bos, v4_tokenizer.eos, v4_tokenizer.vocab_size) == (0, 1, 129280)
    assert [v4_tokenizer.literal(known[DSML]), v4_tokenizer.literal(5)] == [DSML, None]


def test_marked_text_has_the_ids_of_the_public_tokenizer(v4_tokenizer, official):
    text = "a".join(CONTROL_LITERALS) + f"</{DSML}parameter>\n"
    assert v4_tokenizer.encode_marked(text) == ids(official, text)
    assert v4_tokenizer.encode_marked(f"</{DSML}parameter>")[:2] == [1718, 128825]


def test_literal_text_never_gives_an_added_token(v4_tokenizer, v4_tokenizer_json):
    added = json.loads(v4_tokenizer_json.read_bytes())["added_tokens"]
    text = " ".join(entry["content"] for entry in added)
    assert not {entry["id"] for entry in added} & set(v4_tokenizer.encode_literal(text))
    assert v4_tokenizer.decode(v4_tokenizer.encode_literal(text)) == text


SEAMS = [("answer.", "\n\nNext", [19995, 16, 271, 11534], [19995, 339, 11534]),
         ("done>", "\n", [44629, 32, 201], [44629, 1018]), ("foo(", ")\n", [40897, 10, 682], [40897, 3390]),
         ("x = 12", "34", [736, 2012], [6895, 22]), ("中文", "字", [21134, 2024], [525, 10541])]


@pytest.mark.parametrize("left, right, apart, together", SEAMS)
def test_adjacent_texts_are_encoded_as_one(v4_tokenizer, left, right, apart, together):
    assert v4_tokenizer.encode([Text(left), Text(right)])[-len(together):] == together
    assert (v4_tokenizer.encode_literal(left) + v4_tokenizer.encode_literal(right))[-len(apart):] == apart


def test_control_tokens_and_replayed_ids_end_a_run(v4_tokenizer):
    assert v4_tokenizer.encode([Text("中文"), Control(USER), Text("字")]) == [21134, 128803, 2024]
    assert v4_tokenizer.encode([Tokens((21134,), "中文"), Text("字")]) == [21134, 2024]


def test_a_quoted_control_token_has_another_key_than_a_real_one(v4_tokenizer):
    quoted, real = [Text("a" + THINK_OPEN)], [Text("a"), Control(THINK_OPEN)]
    assert v4_tokenizer.key_bytes(quoted) == b"a\xff<think>"
    assert v4_tokenizer.key_bytes(real) == b"a<think>"


PIECES = (st.sampled_from([*CONTROL_LITERALS, "｜", "DSML｜", "<", "thi", "nk>", "a", " 中", "\n"])
          | st.text(max_size=3).map(clean_text))
SEGMENTS = st.one_of(PIECES.map(Text), st.sampled_from(CONTROL_LITERALS).map(Control),
                     st.tuples(st.integers(0, 129279), st.integers(0, 300)).map(lambda ids: Tokens(ids, "")))


@settings(max_examples=300)
@given(segments=st.lists(SEGMENTS, max_size=12))
def test_keys_of_segments_and_of_their_ids_agree(v4_tokenizer, segments):
    assert v4_tokenizer.key_bytes(segments) == v4_tokenizer.key_bytes_of_ids(v4_tokenizer.encode(segments))


def test_token_bytes_are_exact_and_unknown_ids_an_error(v4_tokenizer):
    assert b"".join(map(v4_tokenizer.token_bytes, v4_tokenizer.encode_literal("👍é"))) == "👍é".encode()
    assert v4_tokenizer.token_bytes(128803) == USER.encode()
    with pytest.raises(ValueError, match="no token has the id 129280"):
        v4_tokenizer.token_bytes(129280)


DAMAGE = [("model", "llama", "tokenizer.ggml.model is 'llama', need 'gpt2'"),
          ("pre", None, "tokenizer.ggml.pre is absent"), ("model", np.arange(30), "tokenizer.ggml.model is ndarray"),
          ("model", "\n" * 10_000, "tokenizer.ggml.model is"), ("merges", ["\n" * 10_000], "not two tokens"),
          ("tokens", ["\n" * 10_000] * 2, "appears twice"),
          ("tokens", 7, "tokenizer.ggml.tokens is int"), ("tokens", ["a"], "control tokens .*are missing"),
          ("tokens", ["a", "a"], "'a' appears twice"), ("tokens", [b"a"], "other values than strings"),
          ("tokens", list(CONTROL_LITERALS), "no id for"), ("merges", ["a b c"], "not two tokens"),
          ("merges", ["qq zz"], "no id for")]


@pytest.mark.parametrize("key, value, message", DAMAGE)
def test_a_damaged_vocabulary_is_refused_by_name(gguf_metadata, key, value, message):
    with pytest.raises(ModelFileError, match=message) as error:
        Tokenizer.from_gguf(gguf_metadata | {f"tokenizer.ggml.{key}": value})
    assert len(str(error.value)) < 500 and str(error.value).isprintable()


def test_merges_that_would_forge_a_control_token_are_refused(gguf_metadata):
    forging = {"tokenizer.ggml.tokens": [*gguf_metadata["tokenizer.ggml.tokens"], "think>"],
               "tokenizer.ggml.merges": [*gguf_metadata["tokenizer.ggml.merges"], "think >", "< think>"]}
    with pytest.raises(ModelFileError, match="merges make '<think>'"):
        Tokenizer.from_gguf(gguf_metadata | forging)


NO_TOKENIZERS = [b"", b"[]", b"{}", b'{"model": {"vocab": {}}, "added_tokens": 3}', b"\xff", b"[" * 100_000]


@pytest.mark.parametrize("content", NO_TOKENIZERS)
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match="tokenizer.json"):
        Tokenizer.from_json(path)


@pytest.mark.parametrize("merges", [[[1, 2]], [7], ["ab"], [["a", ""]], None])
def test_merges_that_are_no_pairs_are_refused(v4_tokenizer_json, merges):
    data = json.loads(v4_tokenizer_json.read_bytes())
    data["model"]["merges"] = merges
    with pytest.raises(ModelFileError, match="tokenizer.json: "):
        Tokenizer.from_json(data)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ModelFileError, match="absent.json: No such file"):
        Tokenizer.from_json(tmp_path / "absent.json")


def test_a_tokenizer_that_splits_differently_is_refused(v4_tokenizer_json):
    data = json.loads(v4_tokenizer_json.read_bytes())
    data["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{N}"
    with pytest.raises(ModelFileError, match="splits text by"):
        Tokenizer.from_json(data)


@pytest.mark.parametrize("character", [" ", "a", "1", "\n ", "!", "中", "\u0301"])
def test_long_runs_of_one_character_take_linear_time(v4_tokenizer, character):
    start = time.process_time()  # 200 kB in 0.2 s at most; quadratic work would take minutes
    v4_tokenizer.encode_literal(character * 200_000)
    assert time.process_time() - start < 5
