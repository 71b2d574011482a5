"""What ds4 itself answers on the full-shape file, and how near an engine comes to it.

Random weights amplify rounding: ds4 rounds activations to 8 bits before products, as its CPU engine does everywhere and
its CUDA engine in decode only. The two share 7 of 20 first tokens on `hello`, and 18 of 20 with a median difference of
0.11 on `italian_175`; a wrong engine shares none of 129 280.
"""
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from ds4mlx.chat.dialects.deepseek_v4 import render
from ds4mlx.chat.messages import Conversation, Message, TextPart
from ds4mlx.engine.protocol import Engine
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

DS4 = Path(__file__).parents[1] / "data" / "ds4"
TEXTS = {"hello": "Hello world", "italian_175": (DS4 / "italian_175.txt").read_text("utf-8")}


def prompt(path: Path, text: str) -> list[int]:
    """Token ids: non-thinking, behind ds4's own system text."""
    messages = (Message("system", (TextPart("You are a helpful assistant"),)), Message("user", (TextPart(text),)))
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
    return tokenizer.encode(render(Conversation(messages, thinking=False), effort_profile="preview").segments)


def answering(engine: Engine, path: Path) -> Callable[[str], np.ndarray]:
    """logits(name), f32 [vocab]: of the first token of the answer to that text, by an engine that opened `path`."""
    def logits(name: str) -> np.ndarray:
        session = engine.open(2048)
        engine.prefill(session, prompt(path, TEXTS[name]))
        return session.logits()
    return logits


def compare(logits: np.ndarray, name: str) -> tuple[int, float, int, int]:
    """How many of ds4's top 20 are in our top 40, the median difference on those, and both first tokens."""
    top = json.loads((DS4 / f"{name}.json").read_text())["steps"][0]["top_logprobs"][:20]
    ours = np.argsort(-logits)[:40].tolist()
    shared = [entry for entry in top if entry["token"]["id"] in ours]
    median = float(np.median([abs(entry["logit"] - logits[entry["token"]["id"]]) for entry in shared]))
    print(f"\n{name}: {len(shared)} of ds4's top 20, median difference {median:.3f}", file=sys.stderr)
    return len(shared), median, top[0]["token"]["id"], ours[0]
