"""Hyper-connections: half a layer's output mixed back into the streams, and the next one's input read from them."""
from dataclasses import dataclass

from ds4mlx.cuda_port.build import Defines, kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.forms import MOST_CLUSTER, hyper_shares
from ds4mlx.cuda_port.launch import clusters, launch, processors
from ds4mlx.cuda_port.weight import Weight

CHUNK_TOKENS = 8    # of a longer chunk, a block,
CHANNELS = 64       # which takes so many channels at a time


@dataclass(frozen=True, slots=True)
class Connection:
    """What a half layer, or the head, reads of the streams, and how it is mixed back; fn is of [M, N D]."""
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
    half layer's and leaves those of the next, or in a step sums [T, 2 N + 2 N N], from which `WayBack` makes them."""
    y: "cp.ndarray"
    post: "cp.ndarray"
    m: "cp.ndarray"
    sums: "cp.ndarray"

    def last(self) -> "Update":
        """Of the last token."""
        return Update(self.y[-1:], self.post[-1:], self.m[-1:], self.sums[-1:])


@dataclass(frozen=True, slots=True)
class WayBack:
    """What a step's `hyper_mix` leaves to another launch of the same half layer, which has blocks to spare: 20 rounds
    of divisions take a thread 3 us, and x is wanted at once."""
    of: Connection
    update: Update

    def arguments(self) -> "tuple[cp.ndarray | int | float, ...]":
        of, update = self.of, self.update
        return update.sums, of.scale, of.base, of.iterations, of.hc_eps, of.eps, update.post, update.m

    def defines(self) -> Defines:
        return ("STREAMS", self.update.post.shape[1]), ("HIDDEN", self.update.y.shape[1])


NO_WAY_BACK = (None, None, None, 0, 0.0, 0.0, None, None)


def hyper_mix(streams: "cp.ndarray", of: Connection, update: Update, first: bool, x: "cp.ndarray", step: bool) -> None:
    """streams[t, j] = post[t, j] y[t] + sum_i m[t, i, j] streams[t, i], in place, unless this is the first half layer;
    then x [T, D] = rms(sum_n pre[n] streams[n]) norm, and how this half layer will be mixed back (a head, with M = N,
    is not).

    streams f32 [T, N, D]; all f32. step: T is at most 16, and post and m are left to a `WayBack`.
    """
    T, N, D = streams.shape
    M = of.fn.shape[0]
    defines = (("N", N), ("D", D), ("M", M), ("FN_HALF", int(of.fn.kind == "F16")))
    args = (streams, of.fn.raw, update.y, update.post, update.m, not first, of.scale, of.base, of.norm, of.hc_eps,
            of.eps, x, update.sums, T)
    if step:
        cluster, pairs = hyper_shares(D, MOST_CLUSTER if clusters() else 1)
        passes = D // (2 * pairs * cluster)
        tokens = 1 if T * cluster <= processors() // (1 if passes > 2 else 2) else 2    # two of many passes spill
        defines += (("STEP", 1), ("CLUSTER", cluster), ("PAIRS", pairs), ("PASSES", passes), ("TOKENS", tokens))
        launch(kernel("hyper_mix", "mix", defines), (cluster, -(-T // tokens)), (N * pairs,), args)
        return
    shared = 4 * (CHUNK_TOKENS + 8 * -(-M // 8)) * (N * CHANNELS + 4)
    launch(kernel("hyper_mix", "mix", (*defines, ("STEP", 0)), shared), (-(-T // CHUNK_TOKENS),), (256,),
           (*args, of.iterations), shared)
