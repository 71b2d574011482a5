"""The CUDA engine from end to end: prefill by chunks, one row's decode at several lengths, and several rows together.

    python tests/slow/full_shape.py FLASH.gguf TOKENIZER.json
    python tests/bench/cuda_engine.py FLASH.gguf [--lengths 2048 16384 102400] [--rows 2 4 8 16]

All layers of that file share their bytes. Here each gets a copy of its own on the card first, as the real file's have:
87 GB, and no layer finds its weights in a cache that another has filled. `--shared` leaves that out.
"""
import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ds4mlx.config import Settings
from ds4mlx.cuda_port.engine import CudaEngine, open_cuda
from ds4mlx.cuda_port.models import layers
from ds4mlx.cuda_port.session import CudaSession
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.engine.protocol import Row, Sampling

CHUNK, WARM, STEPS = 2048, 40, 60   # tokens; the first steps at a length compile and capture
GREEDY = Sampling(temperature=0.0)


def unshare() -> None:
    """Copies for all but the first of the tensors that share bytes."""
    shared = layers.tensors

    def tensors(*args):
        found, seen = shared(*args), set()
        for path, tensor in found.items():
            if isinstance(tensor, Weight):
                if tensor.raw.data.ptr in seen:
                    found[path] = tensor = replace(tensor, raw=tensor.raw.copy())
                seen.add(tensor.raw.data.ptr)
        return found

    layers.tensors = tensors


def decode(engine: CudaEngine, sessions: Sequence[CudaSession]) -> float:
    """Seconds a step, each row fed what it sampled."""
    last: list[int | None] = [None] * len(sessions)
    began = 0.0
    for i in range(WARM + STEPS):
        if i == WARM:
            began = time.perf_counter()
        steps = engine.decode([Row(s, GREEDY, token, (0,) * i) for s, token in zip(sessions, last, strict=True)])
        last = [row[0].token for row in steps]
    return (time.perf_counter() - began) / STEPS


def one_row(engine: CudaEngine, tokens: list[int], lengths: Sequence[int]) -> None:
    """A fresh session for each length, so that what was decoded at one is not in the next."""
    for length in lengths:
        session, seconds = engine.open(length + WARM + STEPS + 1), 0.0
        for at in range(0, length, CHUNK):
            began = time.perf_counter()
            engine.prefill(session, tokens[at:min(at + CHUNK, length)])
            seconds = time.perf_counter() - began
        print(f"{length:7d} tokens: last chunk {min(CHUNK, length) / seconds:7.1f} t/s, "
              f"decode {1 / decode(engine, [session]):6.1f} t/s")
        session.close()


def many_rows(engine: CudaEngine, tokens: list[int], counts: Sequence[int]) -> None:
    for count in counts:
        sessions = [engine.open(CHUNK + WARM + STEPS + 1) for _ in range(count)]
        for i, session in enumerate(sessions):
            engine.prefill(session, tokens[100 * i:100 * i + CHUNK])
        seconds = decode(engine, sessions)
        print(f"{count:4d} rows at {CHUNK}: {count / seconds:7.1f} t/s, {1e3 * seconds:.2f} ms a step")
        for session in sessions:
            session.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2048, 16384, 102400])
    parser.add_argument("--rows", type=int, nargs="*", default=[2, 4, 8, 16])
    parser.add_argument("--shared", action="store_true", help="keep shared bytes shared")
    args = parser.parse_args()
    if not args.shared:
        unshare()
    context, rows = max([CHUNK, *args.lengths]) + 4096, max([1, *args.rows])
    began = time.perf_counter()
    engine = open_cuda(Settings(ctx=context, batched_session=rows, prefill_chunk=CHUNK), args.model)
    print(f"opened in {time.perf_counter() - began:.1f} s: {engine.info.quant} on {engine.info.backend}")
    tokens = np.random.default_rng(0).integers(1000, engine.info.vocab, context).tolist()
    warm = engine.open(CHUNK)
    engine.prefill(warm, tokens[:CHUNK])    # compiles
    warm.close()
    one_row(engine, tokens, args.lengths)
    many_rows(engine, tokens, args.rows)
    engine.close()


if __name__ == "__main__":
    main()
