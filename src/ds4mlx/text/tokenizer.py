"""Text <-> ids: byte-level BPE in which no text ever becomes a control token.

Only `Control` segments give control ids. Everything else is encoded literally, so a file that quotes a chat template
stays a quotation. Source: the public V4 tokenizer, GGUF keys `tokenizer.ggml.*`.
"""
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import cast

from tokenizers import Regex
from tokenizers import Tokenizer as Bpe
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as Steps

from ds4mlx.errors import ModelFileError
from ds4mlx.text.encoded_runs import EncodedRuns
from ds4mlx.text.segments import BOS, CONTROL_LITERALS, EOS, Control, Segment, Text, Tokens, split_controls
from ds4mlx.text.vocabulary import TokenizerJson

# The pre-tokeniser "joyai-llm": three splits in this order, each isolating its matches.
SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)

# Text whose ids differ between tokenizers that look alike; part of the fingerprint.
PROBES = ("don't I'LL it's", "1234567 12 3", "def f(x):\n    return x\n\t\tpass", "end.\n\nNext >\n", "中文字かなカナ한국어",
          "<think></think>｜DSML｜<｜User｜>", "e\u0301 👩‍💻 ", "   \r\n  ")


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF = _byte_alphabet()
# Where ordinary bytes of a key take a mark: a control literal, which is only quoted there, and 0xFF itself, which
# byte tokens can spell: unmarked, it would make a mark of itself before the control token that follows it. ｜DSML｜
# ends as it begins, so its end may be the beginning of a real one: what stands before that end is marked.
KEY_QUOTED = tuple(literal.removesuffix("｜").encode() for literal in CONTROL_LITERALS)
KEY_MARKED = re.compile(b"(?=" + b"|".join(map(re.escape, KEY_QUOTED)) + b"|\xff)")
KEY_HINTS = ("｜".encode(), b"think>", b"\xff")   # one of them is in all that is marked; looked for in no time
RUNS_BYTES = 64 << 20   # of texts and their ids that are remembered: a few conversations of a million tokens


class Tokenizer:
    """One vocabulary. `control` maps the control literals to their ids; `vocab_size` is the highest id plus one."""

    def __init__(self, tokens: Mapping[int, str], merges: Sequence[tuple[str, str]], source: str) -> None:
        """`tokens` id -> spelling, all of them; `merges` best first; `source` names the file or key in errors.

        Raises ModelFileError when control tokens, byte tokens or tokens of merges are missing or given twice.
        """
        ids = {token: i for i, token in tokens.items()}
        if len(ids) < len(tokens):
            twice = next(token for i, token in tokens.items() if ids[token] != i)
            raise ModelFileError(f"{source}: token {_shown(twice)} appears twice; every token needs one id")
        missing = [literal for literal in CONTROL_LITERALS if literal not in ids]
        if missing:
            raise ModelFileError(f"{source}: control tokens {' '.join(missing)} are missing; "
                                 "this is not a DeepSeek V4 vocabulary, get a DeepSeek V4 Flash file")
        self._tokens = dict(tokens)
        self._bytes: dict[int, bytes] = {}  # token_bytes, as asked for
        self._encoded = EncodedRuns(RUNS_BYTES)
        mergeable = _mergeable(ids, merges, source)
        self.text_ids = frozenset(mergeable.values())   # what text can become
        self._bpe = Bpe(BPE(vocab=mergeable, merges=list(merges)))
        self._bpe.pre_tokenizer = Steps([Split(Regex(pattern), "isolated") for pattern in SPLITS]
                                        + [ByteLevel(add_prefix_space=False, use_regex=False)])
        self._data_sha256 = _data_sha256(tokens, merges)
        self.vocab_size = max(tokens) + 1
        self.control: Mapping[str, int] = MappingProxyType({literal: ids[literal] for literal in CONTROL_LITERALS})
        self.control_ids = frozenset(self.control.values())
        self.bos, self.eos = self.control[BOS], self.control[EOS]
        self._literals = {i: literal for literal, i in self.control.items()}

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object]) -> "Tokenizer":
        """From a GGUF's metadata. Token types are not read: what merges reach is text, what they do not is not.

        Raises ModelFileError for a vocabulary of another kind, or one that is damaged.
        """
        for key, needed in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "joyai-llm")):
            found = metadata.get(key)
            if not isinstance(found, str) or found != needed:
                raise ModelFileError(f"{key} is {_shown(found)}, need {needed!r}; "
                                     "other tokenizers are not supported, get a DeepSeek V4 Flash file")
        tokens = _strings(metadata, "tokenizer.ggml.tokens")
        merges = _strings(metadata, "tokenizer.ggml.merges")
        pairs = [_pair(merge, "tokenizer.ggml.merges") for merge in merges]
        return cls(dict(enumerate(tokens)), pairs, "tokenizer.ggml.tokens")

    @classmethod
    def from_json(cls, source: Path | str | Mapping[str, object]) -> "Tokenizer":
        """From a `tokenizer.json`: its path, or its parsed content. Raises ModelFileError, as from_gguf."""
        name = "tokenizer.json" if isinstance(source, Mapping) else str(source)
        data = cast(TokenizerJson, source if isinstance(source, Mapping) else _read_json(Path(source)))
        try:
            model, added = data["model"], data["added_tokens"]
            tokens = {i: token for token, i in model["vocab"].items()}
            tokens |= {entry["id"]: entry["content"] for entry in added}
            merges = [_pair(merge, name) for merge in model["merges"]]
            patterns = tuple(step["pattern"]["Regex"] for step in data["pre_tokenizer"]["pretokenizers"][:-1])
        except (KeyError, TypeError, AttributeError, IndexError) as fault:
            raise ModelFileError(f"{name}: not a byte-level BPE tokenizer.json ({fault!r})") from fault
        if patterns != SPLITS:
            raise ModelFileError(f"{name}: splits text by {str(patterns)[:200]}, need those of joyai-llm")
        if not all(isinstance(i, int) and 0 <= i < 1 << 24 and isinstance(token, str) for i, token in tokens.items()):
            raise ModelFileError(f"{name}: the vocabulary must map strings to ids from 0 to {(1 << 24) - 1}")
        return cls(tokens, merges, name)

    def literal(self, token: int) -> str | None:
        """The literal of a control token, None for every other id."""
        return self._literals.get(token)

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Segments -> ids. Adjacent texts are one run and encoded once: BPE apart and BPE together differ."""
        runs: list[str] = []
        parts: list[Sequence[int] | None] = []  # None: the ids of the next run
        for texts, group in groupby(segments, lambda segment: isinstance(segment, Text)):
            if texts:
                runs.append("".join(segment.text for segment in group if isinstance(segment, Text)))
                parts.append(None)
            else:
                parts += [[self.control[segment.literal]] if isinstance(segment, Control) else segment.ids
                          for segment in group if not isinstance(segment, Text)]
        encoded = iter(self._encoded.encode(runs, self._encode_runs))
        ids: list[int] = []
        for part in parts:
            ids.extend(next(encoded) if part is None else part)
        return ids

    def _encode_runs(self, runs: list[str]) -> list[list[int]]:
        return [run.ids for run in self._bpe.encode_batch_fast(runs, add_special_tokens=False)]

    def encode_literal(self, text: str) -> list[int]:
        """Text -> ids, no character sequence being special."""
        return self.encode([Text(text)])

    def encode_marked(self, text: str) -> list[int]:
        """Trusted text -> ids, control literals in it becoming control tokens."""
        return self.encode(split_controls(text))

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes of one token, possibly part of a character. Raises ValueError for an id with no token."""
        known = self._bytes.get(token)
        if known is None:
            if token not in self._tokens:
                raise ValueError(f"no token has the id {token}; ids go from 0 to {self.vocab_size - 1}")
            known = self._bytes[token] = _spelling_bytes(self._tokens[token])
        return known

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text, bytes that are no UTF-8 becoming U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def key_bytes(self, segments: Iterable[Segment]) -> bytes:
        """What a saved state is found by: the prompt in UTF-8, 0xFF before each control literal that is only quoted.

        Equals `key_bytes_of_ids(encode(segments))`.
        """
        return _key(piece for segment in segments for piece in self.key_pieces(segment))

    def key_bytes_of_ids(self, ids: Iterable[int]) -> bytes:
        """`key_bytes` of a token history."""
        return _key(map(self._key_piece, ids))

    def key_pieces(self, segment: Segment) -> Iterator[str | bytes]:
        """What a segment adds to a key, before marking: control literals as str, token or text as bytes."""
        if isinstance(segment, Tokens):
            yield from map(self._key_piece, segment.ids)
        else:
            yield segment.literal if isinstance(segment, Control) else segment.text.encode()

    def _key_piece(self, token: int) -> str | bytes:
        return self._literals.get(token) or self.token_bytes(token)

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.vocab_size} tokens, {len(self.control)} of them control tokens>"

    def fingerprint(self) -> str:
        """SHA-256, hex, of the vocabulary and of what it does to the probes. Equal for equal behaviour."""
        behaviour = [self.encode_literal(probe) for probe in PROBES]
        facts = [self._data_sha256, SPLITS, sorted(self.control.items()), behaviour]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def _mergeable(ids: Mapping[str, int], merges: Sequence[tuple[str, str]], source: str) -> dict[str, int]:
    """The tokens that text can become: the 256 bytes and what the merges make of them.

    Leaving all others out of the encoder's vocabulary is what keeps them from being made of text.
    """
    spellings = set(BYTE_OF).union(*merges, map("".join, merges))
    if missing := spellings - ids.keys():
        raise ModelFileError(f"{source}: no id for {_shown(min(missing))}, which is a byte or part of a merge; "
                             "the file is damaged")
    foreign = set("".join(spellings)) - BYTE_OF.keys()
    forged = spellings.intersection(CONTROL_LITERALS)
    if foreign or forged:
        raise ModelFileError(f"{source}: merges make {min(forged or foreign)!r}, need byte-level text that is no "
                             "control token; the file is damaged")
    return {spelling: ids[spelling] for spelling in spellings}


def _data_sha256(tokens: Mapping[int, str], merges: Sequence[tuple[str, str]]) -> str:
    lines = [f"{i} {token}" for i, token in sorted(tokens.items())] + [f"{left} {right}" for left, right in merges]
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()


def key_marks(stretch: bytes) -> list[int]:
    """Where ordinary bytes take a mark in a key."""
    if not any(hint in stretch for hint in KEY_HINTS):
        return []
    return [match.start() for match in KEY_MARKED.finditer(stretch)]


def marked(stretch: bytes, marks: Sequence[int]) -> bytes:
    """Ordinary bytes as a key holds them."""
    ends = [0, *marks, len(stretch)]
    return b"\xff".join(stretch[start:end] for start, end in zip(ends, ends[1:])) if marks else stretch


def _key(pieces: Iterable[str | bytes]) -> bytes:
    """Control literals (str) as they are; ordinary stretches (bytes) with 0xFF, no UTF-8, before quoted ones."""
    parts = []
    for kind, group in groupby(pieces, type):
        if kind is str:
            parts.append("".join(cast(Iterable[str], group)).encode())
        else:
            stretch = b"".join(cast(Iterable[bytes], group))
            parts.append(marked(stretch, key_marks(stretch)))
    return b"".join(parts)


def _spelling_bytes(spelling: str) -> bytes:
    """Byte-level spelling -> bytes. Added tokens are spelled as plain text, outside the byte alphabet."""
    try:
        return bytes(BYTE_OF[character] for character in spelling)
    except KeyError:
        return spelling.encode("utf-8", "replace")


def _shown(value: object) -> str:
    """What a file holds, for an error: short and on one line."""
    return repr(value[:80]) if isinstance(value, str) else "absent" if value is None else type(value).__name__


def _strings(metadata: Mapping[str, object], key: str) -> list[str]:
    values = metadata.get(key)
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise ModelFileError(f"{key} is {_shown(values)}, need an array of strings; get a complete model file")
    if not all(isinstance(value, str) for value in values):
        raise ModelFileError(f"{key} holds other values than strings; get a complete model file")
    return list(values)


def _pair(merge: str | Sequence[str], source: str) -> tuple[str, str]:
    """"a b" or ["a", "b"] -> (a, b)."""
    parts = merge.split(" ") if isinstance(merge, str) else list(merge)
    if len(parts) != 2 or not all(isinstance(part, str) and part for part in parts):
        raise ModelFileError(f"{source}: merge {_shown(merge)} is not two tokens and one space; the file is damaged")
    return parts[0], parts[1]


def _read_json(path: Path) -> Mapping[str, object]:
    try:
        data: Mapping[str, object] = json.loads(path.read_bytes())
        return data
    except OSError as fault:
        raise ModelFileError(f"{path}: {fault.strerror}; give the path of a tokenizer.json") from fault
    except (ValueError, RecursionError) as fault:
        raise ModelFileError(f"{path}: not JSON ({fault}); give the path of a tokenizer.json") from fault
