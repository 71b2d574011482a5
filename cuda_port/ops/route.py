"""Which experts a token goes to, and how much each of them counts."""
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch
from ds4mlx.cuda_port.ops.hyper_mix import NO_WAY_BACK, WayBack


def route(logits: "cp.ndarray", bias: "cp.ndarray | None", table: "cp.ndarray | None", ids: "cp.ndarray", scale: float,
          selected: "cp.ndarray", weight: "cp.ndarray", back: WayBack | None = None) -> None:
    """selected = table[ids], or the k best of p + bias, ascending; weight = scale p[selected] / their sum.

    p = sqrt(log(1 + e^logits)), logits f32 [T, E]; bias f32 [E] or table i32 [V, k], with ids i32 [T]; selected i32,
    weight f32 [T, k]. back: of the experts' hyper-connection, in a step.
    """
    (T, E), k = logits.shape, selected.shape[1]
    defines = (("E", E), ("K", k), *(back.defines() if back else (("N", 1), ("HIDDEN", 1))))
    entry, how = ("scored", (bias,)) if table is None else ("hashed", (table, ids))
    launch(kernel("route", entry, defines), (T, 2 if back else 1), (32,),
           (logits, *how, selected, weight, scale, *(back.arguments() if back else NO_WAY_BACK)))
