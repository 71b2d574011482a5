"""Saves and loads at random in a directory that others use too: `hammer.py FOLDER SEED SECONDS`.

Exits with an error when a wrong state is loaded, a sound file is refused, or the budget is exceeded by more than what
one other process may be writing.
"""
import logging
import random
import sys
import time
from pathlib import Path

from toy_store import history, job_for, key_of, open_store, same_state

from ds4mlx.sessions.restore import Vanished

BUDGET = 200_000    # some eight checkpoints of the sizes below
RESERVATION = 60_000    # the largest checkpoint
SYSTEM = history(2500, seed=99)


def conversation(rng):
    base = history(rng.choice([3000, 5000]), seed=rng.randrange(2), after=SYSTEM)
    return history(len(base) + 1000 * rng.randrange(3), seed=rng.randrange(2), after=base)


def load_some(store, tokens):
    key = key_of(tokens) + b"%d" % random.randrange(1 << 30)     # another prompt each time
    for candidate in store.find(key).candidates:
        try:
            restored = store.load(candidate, key)
        except Vanished:  # evicted by another process
            continue
        assert same_state(restored, tokens[:candidate.tokens])
        return 1
    return 0


def size(folder):
    total = 0
    for path in folder.iterdir():
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            pass
    return total


def main(folder, seed, seconds):
    rng, store, until, loaded = random.Random(seed), open_store(folder, budget_bytes=BUDGET), time.time() + seconds, 0
    while time.time() < until:
        tokens = conversation(rng)
        loaded += load_some(store, tokens)
        store.save(job_for(store, tokens, rng.choice(["cold", "continued", "evict"]),
                           aliases=((key_of(tokens) + b"?", "thinking-visible"),)), wait_s=1)
        assert size(folder) <= BUDGET + RESERVATION, size(folder)
    assert store.close()
    stats = store_stats(store)
    assert not any(stats[name] for name in ("quarantined", "rejected", "failed")), stats
    print(loaded, stats)
    assert loaded and stats["saved"] and stats["evicted"], stats


def store_stats(store):
    writer = store._writer
    return {"saved": writer.saved, "skipped": writer.skipped, "failed": writer.failed,
            "evicted": store._room.evicted.total(), "rejected": store._rejected,
            "quarantined": len(list((store.path / "quarantine").iterdir()))}


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
