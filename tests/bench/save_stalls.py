"""What saving costs a session that is being decoded, in time between its tokens.

    python tests/bench/save_stalls.py [--step-ms 37] [--tokens 120] [--rounds 3] [--dir FOLDER]

The scripted engine, with steps of that length and a state of Flash's shapes, takes a prompt that ends shortly before a
continued save falls due, nothing of it on disk, and answers past it: five spans of rows and a head are exported, each
between two steps, and written while the next ones are computed. The same prompt is answered without a cache directory.
Told is what the engine's thread does between two steps: time that passes, and processor time, which other work on the
machine hardly changes. Exits 3 when that of a save is longer than a step.
"""
import argparse
import asyncio
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from ds4mlx.chat.messages import Conversation
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Sampling
from ds4mlx.engine.stub import StubEngine, StubSession
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import FLASH
from ds4mlx.service.service import Service
from ds4mlx.service.turn import Turn
from ds4mlx.sessions.identity import SPAN_TOKENS
from ds4mlx.sessions.layout import head_arrays, segment_arrays
from ds4mlx.text.segments import ASSISTANT, CONTROL_LITERALS, THINK_CLOSE
from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer

DUE = 10_240            # tokens at which a continued save falls due
TOKENIZER = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")
WORD = len(CONTROL_LITERALS) + 100


def layout(tokens):
    return {name: (array.shape, array.dtype) for name, array in schema.arrays(FLASH, tokens, packed=True).items()}


class FlashSnapshot:
    """Gives away as many bytes as a state of Flash has, copied as from the device."""

    def __init__(self, tokens):
        self.tokens = np.array(tokens, np.uint32)

    def head(self, spans):
        shapes = head_arrays(layout, len(self.tokens), spans)
        return {name: np.full(shape, 1, dtype) for name, (shape, dtype) in shapes.items()} | {"tokens": self.tokens}

    def span(self, index):
        return {name: np.full(shape, index + 1, dtype) for name, (shape, dtype) in segment_arrays(layout).items()}


class FlashSession(StubSession):
    def snapshot(self):
        return FlashSnapshot(self.tokens)


class FlashEngine(StubEngine):
    """Keeps what passed between its steps, in seconds: of the clock, and of its thread."""

    def __init__(self, step_s):
        super().__init__(lambda prompt: [WORD] * DUE, vocab=TOKENIZER.vocab_size, eos=TOKENIZER.eos)
        self._step_s, self.pauses, self._ended = step_s, [], None

    def open(self, context):
        return FlashSession(context, self._logits)

    def arrays(self, tokens):
        return layout(tokens)

    def decode(self, rows):
        began = time.perf_counter()
        if self._ended is not None:
            self.pauses.append((began - self._ended[0], time.thread_time() - self._ended[1]))
        steps = super().decode(rows)
        time.sleep(max(0.0, self._step_s - (time.perf_counter() - began)))
        self._ended = time.perf_counter(), time.thread_time()
        return steps


async def answered(step_s, tokens, directory):
    """The longest pause between two steps of an answer that begins half its length before DUE, in ms of clock and of
    processor; and what was saved, in bytes."""
    engines = []
    settings = Settings(ctx=2 * DUE, kv_disk_dir=directory, kv_cache_cold_max_tokens=0)
    service = Service(lambda: engines.append(FlashEngine(step_s)) or engines[0], TOKENIZER, settings)
    await service.start()
    engines[0].pauses.clear()
    turn = Turn(Conversation(()), Sampling(temperature=0.0), max_tokens=tokens, api="completions")
    prompt = [WORD] * (DUE - tokens // 2 - 2) + [TOKENIZER.control[ASSISTANT], TOKENIZER.control[THINK_CLOSE]]
    async for _ in service.complete(turn, prompt):
        pass
    pauses, store = engines[0].pauses[1:], service.scheduler.store   # the first holds the prefill
    saved = store.stats().saved_bytes if store and store.flush(60) else 0
    await service.close(5)
    return [1e3 * max(times) for times in zip(*pauses)], saved


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=37, help="27 tokens a second, as an M3 Max decodes with ds4")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="a folder on the disk to measure")
    asked = parser.parse_args()
    pauses = []
    for number in range(asked.rounds):
        with tempfile.TemporaryDirectory(dir=asked.dir) as folder:
            without, _ = asyncio.run(answered(asked.step_ms / 1e3, asked.tokens, None))
            with_saves, saved = asyncio.run(answered(asked.step_ms / 1e3, asked.tokens, Path(folder) / "kv"))
        assert saved > 5 * 7e6, "not all was saved"
        pauses.append(with_saves)
        print(f"round {number + 1}: {saved / 1e6:.1f} MB in {DUE // SPAN_TOKENS} segments and a head; longest pause "
              f"between steps {with_saves[0]:.1f} ms, {with_saves[1]:.1f} of them computing; without saving "
              f"{without[0]:.1f} and {without[1]:.1f}")
    longest = statistics.median(pause for pause, _ in pauses)
    print(f"median of the longest pauses {longest:.1f} ms, a step is {asked.step_ms:.1f} ms")
    raise SystemExit(0 if longest <= asked.step_ms else 3)


if __name__ == "__main__":
    main()
