"""Hyper-connections: half a layer's output mixed back into the streams, and the next one's input read from them."""
from dataclasses import dataclass

import numpy as np

from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.weight import Weight

CHANNELS = 64       # of each stream, a block
LANES = 32
STEP_TOKENS = 16    # up to here a block takes one token
CHUNK_TOKENS = 16   # of a longer chunk, a block


@dataclass(frozen=True, slots=True)
class Connection:
    """What a half layer, or the head, reads of the streams, and how it is mixed back: fn [M, N D], scale, base, norm."""
    fn: Weight
    scale: "cp.ndarray"
    base: "cp.ndarray"
    norm: "cp.ndarray"
    iterations: int
    hc_eps: float
    eps: float


@dataclass(frozen=True, slots=True)
class Update:
    """A half layer's output y [T, D] and how it is mixed back: post [T, N], m [T, N, N]; `hyper_mix` reads the last
    half layer's and leaves those of the next."""
    y: "cp.ndarray"
    post: "cp.ndarray"
    m: "cp.ndarray"

    def last(self) -> "Update":
        """Of the last token."""
        return Update(self.y[-1:], self.post[-1:], self.m[-1:])


def hyper_mix(streams: "cp.ndarray", of: Connection, update: Update, first: bool, x: "cp.ndarray") -> None:
    """streams[t, j] = post[t, j] y[t] + sum_i m[t, i, j] streams[t, i], in place, unless this is the first half layer;
    then x [T, D] = rms(sum_n pre[n] streams[n]) norm, and post and m of this half layer (none for a head: M = N).

    streams f32 [T, N, D]; all f32.
    """
    T, N, D = streams.shape
    parts, M = D // CHANNELS, of.fn.shape[0]
    tokens = 1 if T <= STEP_TOKENS else CHUNK_TOKENS
    groups = -(-T // tokens)
    sums = scratch.take("hyper_mix.sums", (T, parts, M + 1))
    done = scratch.take("hyper_mix.done", (max(groups, 1024),), np.uint32)  # made of zeros, and left so
    defines = (("N", N), ("D", D), ("M", M), ("FN_HALF", int(of.fn.kind == "F16")))
    launch(kernel("hyper_mix", "mix", defines), (parts, groups), (N * CHANNELS + LANES,),
           (streams, of.fn.raw, update.y, update.post, update.m, not first, sums, done, of.scale, of.base, of.norm,
            of.iterations, of.hc_eps, of.eps, x, T, tokens))
