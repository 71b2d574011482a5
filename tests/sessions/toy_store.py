"""Conversations of the toy model and a store for them: rows follow from the tokens, as they do in a real one."""
from dataclasses import replace

import numpy as np
from toy_files import IDENTITY, layout

from ds4mlx.sessions.identity import SPAN_TOKENS
from ds4mlx.sessions.layout import head_views, segment_views
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.store import Store, StoreOptions

VOCABULARY = 5
MB = 1 << 20
OPTIONS = StoreOptions(budget_bytes=64 * MB, rules=SaveRules())


def history(count, seed=0, after=()):
    """`count` tokens, the first of them those of `after`."""
    fresh = np.random.default_rng(seed).integers(0, VOCABULARY, count - len(after))
    return np.concatenate([np.asarray(after, "<u4"), fresh.astype("<u4")])


def state_of(tokens):
    """Every array of the state after these tokens: what a row holds depends on all tokens up to its end."""
    sums = np.cumsum(tokens.astype(np.uint64) * 7 + 1)
    arrays = {}
    for name, (shape, dtype) in layout(len(tokens)).items():
        if name.endswith((".comp", ".index")):
            group = 4 if name.startswith("L2") else 128
            ends = sums[np.arange(1, shape[0] + 1) * group - 1]
            arrays[name] = np.tile((ends % 251).astype(dtype)[:, None], (1, shape[1]))
        else:
            arrays[name] = np.full(shape, sums[-1] % 199, dtype)
    return arrays | {"tokens": tokens}


def key_of(tokens):
    return b"<user>" + bytes(97 + tokens.astype(np.uint8))


def job_for(store, tokens, reason="cold", **changes):
    """What the engine exports to save a state: the head, and the rows that are not on disk."""
    whole, spans = state_of(tokens), len(tokens) // SPAN_TOKENS
    rows = {span: segment_views(whole, layout, span) for span in store.missing_spans(tokens)}
    job = SaveJob(key_of(tokens), "token-text", reason, head_views(whole, layout, spans), rows)
    return replace(job, **changes)


def open_store(path, *, ctx=1 << 20, identity=IDENTITY, directory=None, **options):
    return Store(path, identity, layout, ctx, replace(OPTIONS, **options), directory=directory)


def save(store, tokens, reason="cold", **changes):
    """Saves and waits. The number of saves that were completed by it."""
    before = store.stats().saved
    assert store.save(job_for(store, tokens, reason, **changes)) and store.flush()
    return store.stats().saved - before


def load(store, tokens, slot=0, more=b""):
    """The best candidate's state for a prompt with these tokens and more behind them, None without one."""
    key = key_of(tokens) + more
    found = store.find(key).candidates
    return store.load(found[0], key, slot) if found else None


def same_state(restored, tokens):
    expected = state_of(tokens)
    return restored is not None and restored.arrays.keys() == expected.keys() and all(
        np.array_equal(restored.arrays[name], array) for name, array in expected.items())
