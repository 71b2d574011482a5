"""Which experts a token goes to, and how much each of them counts."""
from ds4mlx.cuda_port.build import kernel
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.launch import launch


def route(logits: "cp.ndarray", bias: "cp.ndarray | None", table: "cp.ndarray | None", ids: "cp.ndarray", scale: float,
          selected: "cp.ndarray", weight: "cp.ndarray") -> None:
    """selected = table[ids], or the k best of p + bias, ascending; weight = scale p[selected] / their sum.

    p = sqrt(log(1 + e^logits)), logits f32 [T, E]; bias f32 [E] or table i32 [V, k], with ids i32 [T]; selected i32,
    weight f32 [T, k].
    """
    (T, E), k = logits.shape, selected.shape[1]
    defines = (("E", E), ("K", k))
    if table is None:
        launch(kernel("route", "scored", defines), (T,), (32,), (logits, bias, selected, weight, scale))
    else:
        launch(kernel("route", "hashed", defines), (T,), (32,), (logits, table, ids, selected, weight, scale))
