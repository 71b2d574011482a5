"""What saves write to disk: measured on the built-in model as a conversation grows, computed for Flash's shapes.

    python tests/bench/cache_writes.py [--steps 5]

A save writes the rows of the spans that no save has written before, and a head. `whole` is what a file with all rows of
the state would take, which is what each save would write if it kept nothing from the one before.
"""
import argparse
import tempfile
from pathlib import Path

from ds4mlx.config import Settings
from ds4mlx.engine.mlx_engine import open_mlx
from ds4mlx.engine.protocol import SPAN_TOKENS
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.sessions.identity import Identity
from ds4mlx.sessions.policy import SaveRules
from ds4mlx.sessions.saving import SaveJob
from ds4mlx.sessions.store import Store, StoreOptions
from ds4mlx.tiny.noise.build import cached

KB, MB, GB = 1e3, 1e6, 1e9
STEP = 10_240    # tokens between continued saves of a server


def measured(steps: int, folder: Path) -> None:
    engine = open_mlx(Settings(ctx=(steps + 1) * SPAN_TOKENS), cached())
    info = engine.info
    identity = Identity(info.base, info.fingerprint, "0" * 64, info.layout, 1, info.quant_bits)
    store = Store(folder, identity, engine.arrays, (steps + 1) * SPAN_TOKENS, StoreOptions(rules=SaveRules()))
    session, total = engine.open((steps + 1) * SPAN_TOKENS), 0
    print("the built-in model\n tokens   written kB   whole kB")
    for step in range(1, steps + 1):
        engine.prefill(session, [5 + (step * 7 + i * i) % 3000 for i in range(SPAN_TOKENS)])
        snapshot = session.snapshot()
        rows = {span: snapshot.span(span) for span in store.missing_spans(snapshot.tokens)}
        store.save(SaveJob(bytes(snapshot.tokens), "token-text", "continued", snapshot.head(step), rows), 10.0)
        store.flush()
        total += store.stats().saved_bytes
        whole = sum(a.nbytes for a in schema.arrays(engine._config, step * SPAN_TOKENS, packed=True).values())
        print(f"{step * SPAN_TOKENS:7,}   {store.stats().saved_bytes / KB:10,.0f}   {whole / KB:8,.0f}")
    print(f"on disk {store.stats().total_bytes / KB:,.0f} kB, written in all {total / KB:,.0f} kB\n")
    store.close()
    engine.close()


def computed() -> None:
    print("Flash\n  tokens   written MB   whole MB   float32 rows, whole MB")
    on_disk = 0.0
    rows = schema.arrays(FLASH, STEP, True)
    span_bytes = sum(a.nbytes for name, a in rows.items() if name.endswith((".comp", ".index")))
    for tokens in range(STEP, 10 * STEP + 1, STEP):
        head = schema.session_bytes(FLASH, tokens, True) - tokens // STEP * span_bytes
        on_disk += span_bytes
        packed, plain = (schema.session_bytes(FLASH, tokens, packed) for packed in (True, False))
        print(f"{tokens:8,}   {(span_bytes + head) / MB:10,.1f}   {packed / MB:8,.1f}   {plain / MB:22,.1f}")
    print(f"on disk after {10 * STEP:,} tokens with the last head: {(on_disk + head) / GB:.3f} GB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="spans of 2048 tokens to compute on the built-in model")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        measured(options.steps, Path(made) / "kv")
    computed()
