"""What is in the cache directory as it was last seen: what to go on from, without asking the disk or waiting for it."""
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ds4mlx.sessions.directory import Found
from ds4mlx.sessions.format import Head
from ds4mlx.sessions.header import KeyKind


@dataclass(frozen=True, slots=True)
class Record:
    """A sound head, without its key and its tools. `unusable`: why it is not for this server, "" when it is."""
    found: Found
    head: Head              # key and tool map emptied
    text_bytes: int
    tokens_sha1: str
    call_ids: tuple[str, ...]
    unusable: str

    @property
    def name(self) -> str:
        return self.found.name


@dataclass(frozen=True, slots=True)
class AliasRecord:
    found: Found
    text_bytes: int
    key_kind: KeyKind
    target: str


@dataclass(frozen=True, slots=True)
class Match:
    """A head whose key, or alias, is a prefix of a request's key. `alias`: that file's name, "" for the head's own."""
    record: Record
    text_bytes: int
    key_kind: KeyKind
    alias: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """One look at a directory; nothing in it changes afterwards."""
    heads: Mapping[str, Record] = field(default_factory=dict)
    aliases: Mapping[str, AliasRecord] = field(default_factory=dict)
    segments: frozenset[str] = frozenset()
    call_ids: Mapping[str, str] = field(default_factory=dict)   # tool call -> head that holds its block

    def matches(self, key: bytes) -> list[Match]:
        """Every head, usable or not, that has a key or an alias which `key` begins with, by SHA-1 alone."""
        digests = prefix_digests(key, {r.text_bytes for r in self.heads.values()}
                                 | {a.text_bytes for a in self.aliases.values()})
        found = [Match(record, record.text_bytes, record.head.key_kind) for name, record in self.heads.items()
                 if digests.get(record.text_bytes) == sha1_of(name)]
        found += [Match(self.heads[alias.target], alias.text_bytes, alias.key_kind, name)
                  for name, alias in self.aliases.items()
                  if digests.get(alias.text_bytes) == sha1_of(name) and alias.target in self.heads]
        return found

    def covering(self, tokens: np.ndarray) -> list[Record]:
        """Usable heads whose tokens are a prefix of `tokens`, the longest last."""
        digests = prefix_digests(token_bytes(tokens), {4 * r.head.tokens for r in self.heads.values()})
        found = [r for r in self.heads.values() if not r.unusable and digests.get(4 * r.head.tokens) == r.tokens_sha1]
        return sorted(found, key=lambda r: r.head.tokens)

    def recent(self) -> list[str]:
        """Files with keys, those of the heads used last first, each head before its aliases. Without heads whose spans
        another one goes on from: its key is the longer one."""
        usable = [record for record in self.heads.values() if not record.unusable]
        held = {record.head.segments[:n] for record in usable for n in range(1, len(record.head.segments))}
        files: list[str] = []
        for record in sorted(usable, key=lambda r: (r.head.last_used, r.head.tokens), reverse=True):
            if record.head.segments not in held:
                files += [record.name, *(name for name, a in self.aliases.items() if a.target == record.name)]
        return files


def token_bytes(tokens: np.ndarray) -> memoryview:
    return np.ascontiguousarray(tokens, "<u4").view(np.uint8).data


def prefix_digests(data: bytes | memoryview, lengths: Iterable[int]) -> dict[int, str]:
    """SHA-1 of the first n bytes for each n that is not longer, in one pass."""
    view, running, at, out = memoryview(data), hashlib.sha1(usedforsecurity=False), 0, {}
    for length in sorted(n for n in set(lengths) if n <= len(view)):
        running.update(view[at:length])
        at = length
        out[length] = running.copy().hexdigest()
    return out


def sha1_of(name: str) -> str:
    """The SHA-1 in a file's name."""
    return name.partition("-")[0]
