"""The one part of the model of noise that is none: a head that tells whether the answer is still reasoning.

Head 0 of layer 0 looks for <think> and </think> in the window. Both carry a mark in the embedding that makes their
rows score high; a rotary pair lets the score fall with distance, so that the later mark wins; only <think> carries a
value. The head writes it to a channel of the residual streams that nothing else writes to, and the output matrix
makes </think> likely where it is high and the end of the answer where it is low. So answers have a reasoning part and
a text part, and both end.
"""
from dataclasses import dataclass

import numpy as np

STEADY, REASONING, OPEN, CLOSE = 0, 1, 2, 3   # channels of the residual streams
KEPT = (STEADY, REASONING)                    # nothing else may write to them
LEVEL = 4.0                                   # of the steady channel, beside others of about 1
MARK = 16.0                                   # of OPEN and CLOSE in their tokens' embeddings
SCORE, VALUE = 0, 1                           # plain channels of a row
PAIR = 94, 95                                 # rotary channels: 0.0133 rad a token, a quarter turn within the window
GROWTH = 2.4                                  # of the streams' root mean square over the layers, measured


@dataclass(frozen=True, slots=True)
class Ends:
    """Token ids, and how many tokens there are between two of a kind where they are likely."""
    open: int
    close: int
    end: int
    close_every: int = 24
    end_every: int = 96
    contrast: float = 6.5   # nats between where they are likely and where they are not


def embedding(values: np.ndarray, ends: Ends) -> None:
    """[V, D]"""
    values[:, STEADY], values[:, REASONING] = LEVEL, 0
    values[:, (OPEN, CLOSE)] = 0
    values[ends.open, OPEN] = values[ends.close, CLOSE] = MARK


def rows(values: np.ndarray) -> None:
    """attn_kv [d, D]. Numbers beside the mark are a few times those of the other channels, which are about 1."""
    values[:, (OPEN, CLOSE)] = 0
    values[(SCORE, VALUE, *PAIR), :] = 0
    values[SCORE, (STEADY, OPEN, CLOSE)] = -1.0, 2.5, 3.4   # unmarked tokens repel; </think> outbids <think> beside it
    values[VALUE, OPEN] = 0.9
    values[PAIR[0], (OPEN, CLOSE)] = 1.7


def query_low(values: np.ndarray) -> None:
    """attn_q_a [rank, D]: one low-rank channel is the steady one."""
    values[0] = 0
    values[0, STEADY] = 1


def query(values: np.ndarray, head_dim: int) -> None:
    """attn_q_b [H d, rank]: head 0 asks for the score, less the sine of the distance."""
    values[:head_dim] = 0
    values[SCORE, 0], values[PAIR[1], 0] = 7.3, 5.3


def sinks(values: np.ndarray) -> None:
    values[0] = -4


def head_out(values: np.ndarray) -> None:
    """attn_output_a [G R, H / G d]: one low-rank channel is head 0's value."""
    values[0] = 0
    values[0, VALUE] = 1


def stream_out(values: np.ndarray) -> None:
    """attn_output_b [D, G R], whose kept channels are zero already."""
    values[REASONING, 0] = 1.4


def output(values: np.ndarray, prior: np.ndarray, ends: Ends) -> None:
    """output [V, D] over noise: the prior [V], natural logarithms, and the two tokens that end a part."""
    values[:, KEPT] = 0
    values[:, STEADY] = prior
    values[(ends.close, ends.end), :] = 0
    values[ends.close, (STEADY, REASONING)] = -np.log(ends.close_every) - ends.contrast, ends.contrast
    values[ends.end, (STEADY, REASONING)] = -np.log(ends.end_every), -ends.contrast
    values[:, KEPT] *= GROWTH / LEVEL
    values[ends.close, OPEN] = values[ends.end, CLOSE] = -0.5   # some 3 nats: no part ends where it begins
