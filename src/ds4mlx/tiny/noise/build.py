"""The model of noise: every kind of layer of DeepSeek V4 Flash in 11 MB of seeded noise, written as a GGUF.

It is for tests of numbers: its text means nothing. Only what makes the noise presentable is
set by hand: a prior over tokens, so that words are likely and control tokens are not, and the circuit beside this
file, which ends reasoning and answer. All else is random at the scales of a trained model, so that every layer has its
say in every logit.
"""
import hashlib
import json
import re
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

import numpy as np

from ds4mlx import __version__
from ds4mlx.config import cache_dir
from ds4mlx.errors import ModelFileError
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.gguf.writer import quantize, write_gguf
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.names import Expected, expected_tensors
from ds4mlx.text.segments import EOS, THINK_CLOSE, THINK_OPEN
from ds4mlx.text.tokenizer import Tokenizer
from ds4mlx.text.vocabulary import gguf_keys
from ds4mlx.tiny.noise import circuit

NAME = "ds4mlx noise"
CHECKPOINT = "noise-0731"   # decides what reasoning efforts the model is taken to understand
SEED = 20260731
SPREAD = 1.5                # of the logits around the prior, in nats
SOURCES = ("build.py", "circuit.py", "config.json", "tokenizer.json")


def cached() -> Path:
    """The model's file in the user's cache, built when it is not there. Raises ModelFileError where that fails."""
    path = cache_path()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return build(path)
    except OSError as fault:
        raise ModelFileError(f"{path}: the model of noise cannot be written there ({fault.strerror}); make room, or "
                             "set XDG_CACHE_HOME to a directory that can be written") from fault


@cache
def cache_path() -> Path:
    """Its name carries a digest of what it is made from: another version never reads an old file."""
    digest = hashlib.sha256(__version__.encode())
    for source in SOURCES:
        digest.update(_source(source))
    return cache_dir() / f"noise-{digest.hexdigest()[:12]}.gguf"


def build(path: Path) -> Path:
    """Write the model to `path`, whole or not at all; the same bytes every time. Takes about a second."""
    config, vocabulary = Config.from_official(_json("config.json")), _json("tokenizer.json")
    weights = Weights(config, Tokenizer.from_json(vocabulary))
    tensors = [(name, kind := _kind(name, need), need.shape, weights.maker(name, kind, need.shape))
               for name, need in expected_tensors(config).items()]
    write_gguf(path, config.to_gguf() | gguf_keys(vocabulary, config.vocab_size) | {
        "general.name": NAME, "ds4mlx.checkpoint": CHECKPOINT}, tensors)
    return path


def _source(name: str) -> bytes:
    return (resources.files("ds4mlx.tiny.noise") / name).read_bytes()


def _json(name: str) -> dict[str, object]:
    return json.loads(_source(name))


def _kind(name: str, need: Expected) -> str:
    """The type of the q2 recipe: low bits for the routed experts, else what published files have."""
    if "_exps." in name:
        return "Q2_K" if "down" in name else "IQ2_XXS"
    return need.kinds[0]


# ---- the prior over tokens

NEVER = -15.0  # tokens below it have no noise that could lift them
WORD, PIECE, POINT = re.compile(" ?[a-z]+"), re.compile("[a-z]{1,4}"), re.compile("[.,]")


def _prior(tokenizer: Tokenizer) -> np.ndarray:
    """Natural log-probability of each token [V] before the noise: frequent words first, as merges are ordered."""
    weight = np.full(tokenizer.vocab_size, 2 * NEVER)
    for token in range(tokenizer.vocab_size):
        try:
            text = tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            continue
        if token not in tokenizer.control_ids and text.isprintable():
            weight[token] = _likely(text) - 0.5 * np.log(token + 100)
    return weight - np.log(np.exp(weight).sum()) - SPREAD ** 2 / 2  # which is what noise adds, in the mean


def _likely(text: str) -> float:
    if POINT.fullmatch(text):
        return 2.5
    if text.startswith(" ") and WORD.fullmatch(text):
        return 1.0
    return -3.0 if PIECE.fullmatch(text) else -6.0


# ---- the weights

Maker = Callable[[], np.ndarray]


class Weights:
    """Noise and circuit. Each tensor has a generator of its own, so that none depends on the order of the others."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        self.config, self.prior = config, _prior(tokenizer)
        self.ends = circuit.Ends(*(tokenizer.control[literal] for literal in (THINK_OPEN, THINK_CLOSE, EOS)))

    def maker(self, name: str, kind: str, shape: tuple[int, ...]) -> Maker:
        """A function that makes the tensor's blocks u8 when they are due."""
        seed = int.from_bytes(hashlib.sha256(f"{SEED} {name}".encode()).digest()[:8], "big")
        if "_exps." in name:
            return lambda: _expert_blocks(kind, shape, np.random.default_rng(seed))
        return lambda: quantize(self._values(name, shape, np.random.default_rng(seed)), kind)

    def _values(self, name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
        if "tid2eid" in name:  # distinct experts for each token
            return rng.random((shape[0], self.config.n_routed_experts)).argsort(axis=1)[:, :shape[1]]
        mean, spread = next((around for part, around in AROUND if part in name), (0, 1 / np.sqrt(shape[-1])))
        values = (mean + spread * rng.standard_normal(shape)).astype(np.float32)
        if name.endswith(("attn_output_b.weight", "ffn_down_shexp.weight")):
            values[circuit.KEPT, :] = 0
        self._set_circuit(name, values)
        return values

    def _set_circuit(self, name: str, values: np.ndarray) -> None:
        match name:
            case "token_embd.weight":
                circuit.embedding(values, self.ends)
            case "blk.0.attn_kv.weight":
                circuit.rows(values)
            case "blk.0.attn_q_a.weight":
                circuit.query_low(values)
            case "blk.0.attn_q_b.weight":
                circuit.query(values, self.config.head_dim)
            case "blk.0.attn_sinks.weight":
                circuit.sinks(values)
            case "blk.0.attn_output_a.weight":
                circuit.head_out(values)
            case "blk.0.attn_output_b.weight":
                circuit.stream_out(values)
            case "output.weight":
                values[self.prior < NEVER] = 0
                circuit.output(values, self.prior, self.ends)


# Part of a name -> mean and spread; the first that fits. Others are matrices that keep the scale of their input.
AROUND = (("token_embd", (0, 1)), ("output.weight", (0, SPREAD / 16)), ("norm.weight", (1, 0)),
          ("_scale.weight", (1, 0)), ("_base.weight", (0, 0.5)), ("_fn.weight", (0, 0.02)), ("attn_sinks", (0, 1)),
          ("exp_probs_b", (0, 0.1)), ("_ape.weight", (0, 0.5)))


def _expert_blocks(kind: str, shape: tuple[int, int, int], rng: np.random.Generator) -> np.ndarray:
    """Random blocks whose weights have mean 0 and the spread of other matrices: any bits are valid ones."""
    experts, rows, width = shape
    spread = 1 / np.sqrt(width)
    blocks = rng.integers(0, 256, (experts, rows, width // 256, BLOCK_TYPES[kind].bytes), np.uint8)
    if kind == "IQ2_XXS":
        blocks[..., :2] = _half(spread / 60)
    else:
        blocks[..., 80:82], blocks[..., 82:84] = _half(spread / 12), _half(spread / 8)
        blocks[:, circuit.KEPT, :, 80:84] = 0  # weights of 0
    return blocks.reshape(experts, rows, -1)


def _half(value: float) -> np.ndarray:
    return np.array([value], "<f2").view(np.uint8)
