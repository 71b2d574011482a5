"""Cold, from disk or gone back to: in the same slices, a prompt comes to the same state and logits, bit for bit."""
from dataclasses import dataclass

import numpy as np
import pytest
from state import whole

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.gguf.reader import GGUF
from ds4mlx.service.slot import Slot
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.lookup import Wanted
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.store import Store, StoreOptions
from ds4mlx.text.tokenizer import Tokenizer

EDGES = [3, 4, 5, 127, 128, 129, 131, 132, 255, 256, 257]   # where rows of 4 and 128 tokens begin and end
SPANS = [2047, 2048, 2049]                                  # where rows go to files of their own
SUFFIX = 37
CASES = [("official", n) for n in EDGES + SPANS] + [("none", n) for n in EDGES]


@dataclass
class Request:
    wanted: Wanted
    origins = ()

    def after_key(self, key_bytes):
        raise AssertionError("these prompts share tokens, not only text")


@pytest.fixture(scope="module")
def engines(tiny_path):
    """By rounding."""
    opened = {rounding: open_mlx(Settings(ctx=8192, kv_round=rounding), tiny_path) for rounding in ("official", "none")}
    yield opened
    for engine in opened.values():
        engine.close()


@pytest.fixture(params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request, engines):
    """An engine, and how many tokens are reused."""
    return engines[request.param[0]], request.param[1]


@pytest.fixture(scope="module")
def tokenizer(tiny_path):
    with GGUF.open(tiny_path) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module")
def ids(tokenizer):
    """Words in no order: every place between two of them is one that a prompt can be cut at."""
    words = [i for i in range(tokenizer.vocab_size) if tokenizer.literal(i) is None
             and tokenizer.token_bytes(i).isalpha() and tokenizer.token_bytes(i).isascii()]
    return np.random.default_rng(11).choice(words, max(SPANS) + SUFFIX).tolist()


def prefilled(engine, session, tokens, start=0):
    """The tokens from `start` on, in slices of 2048."""
    for at in range(start, len(tokens), 2048):
        engine.prefill(session, tokens[at:min(at + 2048, len(tokens))])
    return session


def ended(pieces):
    """What they come to, one by one."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            return end.value


def same(session, expected):
    ours, theirs = whole(session), whole(expected)
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in theirs)


@pytest.fixture(scope="module")
def cold(ids):
    """cold(engine, n): a session that took n tokens, then the suffix; each computed once."""
    known = {}

    def compute(engine, n):
        if (engine, n) not in known:
            known[engine, n] = prefilled(engine, engine.open(8192), ids[:n])
            engine.prefill(known[engine, n], ids[n:n + SUFFIX])
        return known[engine, n]

    return compute


def test_going_on_from_disk_is_exact(case, tokenizer, ids, cold, tmp_path):
    engine, n = case
    rules, info = SaveRules(min_tokens=1), engine.info
    identity = Identity(info.base, info.fingerprint, tokenizer.fingerprint(), info.layout, 1, info.quant_bits)
    store = Store(tmp_path / "kv", identity, engine.arrays, 8192, StoreOptions(rules=rules))
    first, second = (Slot(engine, tokenizer, 8192, store, rules, 2048) for _ in range(2))
    prefilled(engine, first.session, ids[:n])
    assert first.save("cold") and store.flush()
    prompt = ids[:n + SUFFIX]
    start = ended(second.begin(Request(Wanted(prompt, tokenizer.key_bytes_of_ids(prompt)))))
    assert (start.source, start.rest) == ("disk-text", ids[n:n + SUFFIX]) and same(second.session, first.session)
    engine.prefill(second.session, start.rest)
    store.close()
    assert same(second.session, cold(engine, n))


def test_going_back_is_exact(case, ids, cold):
    engine, n = case
    session = prefilled(engine, engine.open(8192), ids[:n])
    session.mark()
    engine.prefill(session, ids[:200])                  # another way, past a window and several rows
    engine.prefill(session, ids[200:201])
    assert session.rewind(n) == n
    engine.prefill(session, ids[n:n + SUFFIX])
    assert same(session, cold(engine, n))
