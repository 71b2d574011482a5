"""How fast a long state comes back from disk, against one plain sequential read of the same bytes.

    python tests/bench/restore_speed.py [--tokens 100000] [--dir FOLDER] [--rounds 5]

Writes a state of Flash's shapes, filled with noise, by two saves; then in turn reads its files one after the other into
one buffer, and restores it by text with all checksums. Both start with a cold page cache. Also tells what was written.
"""
import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.sessions.identity import SPAN_TOKENS, Identity
from ds4mlx.sessions.layout import head_views, segment_views
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.store import Store, StoreOptions

IDENTITY = Identity("a" * 64, "b" * 64, "c" * 64, "d" * 64, engine_abi=1, quant_bits=2)
MB = 1e6
KEY = b"text of the prompt; "


def layout(tokens):
    return {name: (array.shape, array.dtype) for name, array in schema.arrays(FLASH, tokens, packed=True).items()}


def noise(tokens):
    """A state with Flash's arrays; rows that compress badly, as real ones do."""
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
              for name, (shape, dtype) in layout(tokens).items() if dtype != np.float32}
    arrays |= {name: rng.standard_normal(shape, np.float32) for name, (shape, dtype) in layout(tokens).items()
               if dtype == np.float32}
    arrays["tokens"] %= FLASH.vocab_size
    return {name: arrays[name] for name in layout(tokens)}


def key_for(tokens):
    return KEY * (4 * tokens // len(KEY))  # some four bytes a token


def save(store, whole):
    tokens = len(whole["tokens"])
    spans = tokens // SPAN_TOKENS
    rows = {span: segment_views(whole, layout, span) for span in store.missing_spans(whole["tokens"])}
    started = time.perf_counter()
    job = SaveJob(key_for(tokens), "token-text", "evict", head_views(whole, layout, spans), rows)
    assert store.save(job) and store.flush(600) and not store.stats().failed
    took = time.perf_counter() - started
    head = next(f for f in store.path.glob("*.kvm") if f.stat().st_mtime_ns == max(
        p.stat().st_mtime_ns for p in store.path.glob("*.kvm")))
    print(f"saved {tokens} tokens: {store.stats().saved_bytes / MB:.1f} MB in {took:.2f} s, "
          f"head {head.stat().st_size / MB:.1f} MB")


def begin(whole, tokens):
    """The same conversation earlier: its first tokens, and the frontiers of that length."""
    earlier = noise(tokens)
    return {name: whole[name][:len(earlier[name])] if name == "tokens" or name.endswith((".comp", ".index"))
            else earlier[name] for name in earlier}


def evict_pages(paths):
    if not hasattr(os, "posix_fadvise"):
        raise SystemExit("needs posix_fadvise to read from the disk and not from memory; run it on Linux")
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def plain_read(paths):
    total = sum(path.stat().st_size for path in paths)
    started, at = time.perf_counter(), 0
    buffer = memoryview(np.empty(total, np.uint8))  # as a restore does, it reads into memory that is new
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while count := file.readinto(buffer[at:]):
                at += count
    assert at == total
    return time.perf_counter() - started


def restore(store, tokens, slot):
    key = key_for(tokens) + b"and more"
    started = time.perf_counter()
    (candidate, *_) = store.find(key, slot).candidates
    restored = store.load(candidate, key, slot)
    assert len(restored.tokens) == tokens
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
        store = Store(Path(folder) / "cache", IDENTITY, layout, 1 << 20, StoreOptions(budget_bytes=100 << 30))
        whole = noise(asked.tokens)
        if asked.tokens > 12_288:
            save(store, begin(whole, asked.tokens // SPAN_TOKENS * SPAN_TOKENS - 10_240))
        save(store, whole)
        (name, *_) = [c.name for c in store.find(key_for(asked.tokens)).candidates]
        paths = [store.path / name, *(p for p in sorted(store.path.glob("*.kvs")))]
        size = sum(path.stat().st_size for path in paths)
        plain, back = [], []
        for slot in range(asked.rounds):
            evict_pages(paths)
            plain.append(plain_read(paths))
            evict_pages(paths)
            back.append(restore(store, asked.tokens, slot))
        store.close()
    one, two = statistics.median(plain), statistics.median(back)
    print(f"{size / MB:.0f} MB: plain read {one:.2f} s ({size / MB / one:.0f} MB/s), restore {two:.2f} s "
          f"({size / MB / two:.0f} MB/s), {one / two:.0%} of its speed; median of {asked.rounds}")


if __name__ == "__main__":
    main()
