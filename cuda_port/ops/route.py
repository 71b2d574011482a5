"""Which experts a token goes to, and how much each of them counts."""
from ds4mlx.cuda_port import scratch
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import clusters, launch, limits
from ds4mlx.cuda_port.ops.dense_matmul import dense
from ds4mlx.cuda_port.ops.hyper_mix import NO_WAY_BACK, WayBack
from ds4mlx.cuda_port.weight import Weight

LANES = 32
CLUSTER = 8             # blocks that share a token's channels
CLUSTERS = 4            # at most: more tokens are faster as any other product
BLOCK_BYTES = 256 << 10     # of the gate, at most: a part of them in registers


def route(logits: "cp.ndarray", bias: "cp.ndarray | None", table: "cp.ndarray | None", ids: "cp.ndarray", scale: float,
          selected: "cp.ndarray", weight: "cp.ndarray", back: WayBack | None = None) -> None:
    """selected = table[ids], or the k best of p + bias, ascending; weight = scale p[selected] / their sum.

    p = sqrt(log(1 + e^logits)), logits f32 [T, E]; bias f32 [E] or table i32 [V, k], with ids i32 [T]; selected i32,
    weight f32 [T, k]. back: of the experts' hyper-connection, in a step.
    """
    (T, E), k = logits.shape, selected.shape[1]
    defines = (("E", E), ("K", k), *(back.defines() if back else (("STREAMS", 1), ("HIDDEN", 1))))
    launch(kernel("route", "scored", defines), (T, 2 if back else 1), (LANES,),
           (logits, bias, table, ids, selected, weight, scale, *(back.arguments() if back else NO_WAY_BACK)))


def route_step(x: "cp.ndarray", gate: Weight, bias: "cp.ndarray | None", table: "cp.ndarray | None",
               ids: "cp.ndarray", scale: float, selected: "cp.ndarray", weight: "cp.ndarray", back: WayBack,
               exact: bool) -> None:
    """`route` of x f32 [T, D] times gate [E, D], T <= 16: one launch for few tokens whose gate a cluster can hold."""
    (T, D), E, k = x.shape, gate.shape[0], selected.shape[1]
    if not (clusters() and T <= CLUSTERS and gate.kind == "F16" and _held(E, D)):
        logits = scratch.take("router", (T, E))
        dense(x, [gate], [logits], quality=exact)
        route(logits, bias, table, ids, scale, selected, weight, back)
        return
    defines, shared = (("E", E), ("K", k), *back.defines(), ("CLUSTER", CLUSTER)), _shared_bytes(E, D)
    launch(kernel("route", "routed", defines, shared), (CLUSTER, T), (2 * E + LANES,),
           (x, gate.raw, bias, table, ids, selected, weight, scale, *back.arguments()), shared)


def _held(experts: int, channels: int) -> bool:
    part = channels // CLUSTER
    return (experts % 16 == 0 and 2 * experts + LANES <= 1024 and part % 32 == 0 and part * CLUSTER == channels
            and 2 * experts * part <= BLOCK_BYTES
            and _shared_bytes(experts, channels) + 4 * (CLUSTER * experts + part + 16) + 64 <= limits().of_block_bytes)


def _shared_bytes(experts: int, channels: int) -> int:
    """What of a block's part of the gate is not in registers."""
    pieces = channels // CLUSTER // 16
    return 16 * 2 * experts * (pieces - (pieces * 3 + 15) // 16 * 2)
