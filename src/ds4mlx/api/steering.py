"""Directions to steer along, from prompts in pairs: where the model's outputs part when the prompts do."""
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ds4mlx.api.model import Model
from ds4mlx.api.rendering import Messages
from ds4mlx.models.deepseek_v4.directions import Steering


def directions(model: Model, pairs: Sequence[tuple[str | Messages, str | Messages]],
               part: Literal["attn", "ffn"] = "ffn", strength: float = 1.0) -> Steering:
    """For each layer, the mean difference of what `part` gives at the last tokens of two prompts, as a unit vector.

    A prompt is text, or a conversation that is to be answered. The steering takes what the first of each pair has
    more than the second away; a negative strength adds it. Raises ValueError for what is no pair, BadRequest,
    UsageError.
    """
    if not pairs or any(isinstance(pair, str) or len(pair) != 2 for pair in pairs):
        raise ValueError('directions need pairs of prompts, one at least, such as [("The river", "The stone")]')
    if part not in ("attn", "ffn"):
        raise ValueError(f"part is {part!r}, need attn or ffn")
    sums = sum(_outputs(model, more, part) - _outputs(model, less, part) for more, less in pairs)
    lengths = np.linalg.norm(sums, axis=-1, keepdims=True)
    vectors = (sums / np.where(lengths > 0, lengths, 1)).astype(np.float32)
    return Steering(vectors, **{"attn": 0.0, "ffn": 0.0, part: strength})


def _outputs(model: Model, prompt: str | Messages, part: Literal["attn", "ffn"]) -> np.ndarray:
    """f64 [layers, D], of the last token of a prompt, not steered."""
    tokenizer = model.tokenizer
    ids = ([tokenizer.bos, *tokenizer.encode_literal(prompt)] if isinstance(prompt, str)
           else model.render(prompt).tokens)
    with model.session(len(ids)) as session:
        session.steering = None
        session.read(ids)
        taps = session.taps(len(ids) - 1)
    return np.stack([getattr(layer, part)[0] for layer in taps.layers.values()]).astype(np.float64)
