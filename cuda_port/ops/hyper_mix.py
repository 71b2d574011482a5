"""Hyper-connections: half a layer's output mixed back into the streams, and the next one's input read from them."""
from dataclasses import dataclass

from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import clusters, launch
from ds4mlx.cuda_port.weight import Weight

LANES = 32
MOST_PAIRS = 256    # of channels of each stream, a block
STEP_TOKENS = 16    # up to here a token is a cluster of blocks
CHUNK_TOKENS = 8    # of a longer chunk, a block,
CHANNELS = 64       # which takes so many channels at a time


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
    M = of.fn.shape[0]
    defines = (("N", N), ("D", D), ("M", M), ("FN_HALF", int(of.fn.kind == "F16")))
    args = (streams, of.fn.raw, update.y, update.post, update.m, not first, of.scale, of.base, of.norm, of.iterations,
            of.hc_eps, of.eps, x)
    if T <= STEP_TOKENS:
        cluster, pairs = _shares(D)
        defines += (("STEP", 1), ("CLUSTER", cluster), ("PAIRS", pairs), ("PASSES", D // (2 * pairs * cluster)))
        launch(kernel("hyper_mix", "mix", defines), (cluster, T), (N * pairs,), args)
        return
    shared = 4 * (CHUNK_TOKENS + 8 * -(-M // 8)) * (N * CHANNELS + 4)
    launch(kernel("hyper_mix", "mix", (*defines, ("STEP", 0)), shared), (-(-T // CHUNK_TOKENS),), (256,), (*args, T), shared)


def _shares(D: int) -> tuple[int, int]:
    """Blocks that share a token's channels, and pairs of them that a block takes at a time, a thread each."""
    for cluster in (8, 4, 2, 1) if clusters() else (1,):
        for pairs in range(MOST_PAIRS, 0, -LANES):
            if D % (2 * pairs * cluster) == 0:
                return cluster, pairs
    raise ValueError(f"hyper_mix: {D} channels, needed a multiple of {2 * LANES}")
