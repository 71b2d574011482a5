"""Products in their simplest form: matrices decoded once on the host, CuPy's own products. What fast ones are checked
against; for small models."""
import numpy as np

from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.weight import Weight
from ds4mlx.gguf.dequant import dequantize

_decoded: dict[int, "tuple[cp.ndarray, cp.ndarray]"] = {}   # with what was decoded, whose address is the key


def matrix(w: Weight) -> "cp.ndarray":
    """f32 of `w.shape`."""
    key = w.raw.data.ptr
    if key not in _decoded:
        _decoded[key] = w.raw, cp.asarray(dequantize(cp.asnumpy(w.raw), w.kind).reshape(w.shape).astype(np.float32))
    return _decoded[key][1]


def dense(x: "cp.ndarray", weights: list[Weight], out: list["cp.ndarray"], groups: int = 1,
          quality: bool = False) -> None:
    """out[i] = x W_i^T."""
    for w, y in zip(weights, out, strict=True):
        for g in range(groups):
            rows, k, n = matrix(w), w.shape[1], w.shape[0] // groups
            y[:, g * n:(g + 1) * n] = x[:, g * k:(g + 1) * k] @ rows[g * n:(g + 1) * n].T


def expert_gate_up(x: "cp.ndarray", selected: "cp.ndarray", weight: "cp.ndarray", w1: Weight, w3: Weight,
                   shared: tuple[Weight, Weight], limit: float, out: "cp.ndarray", quality: bool = False) -> None:
    """out[t, s] = weight[t, s] swiglu(W1[e] x[t], W3[e] x[t]), and the shared expert's last."""
    gate, up = matrix(w1), matrix(w3)
    for t in range(len(x)):
        for s, e in enumerate(cp.asnumpy(selected[t]).tolist()):
            out[t, s] = weight[t, s] * _swiglu(gate[e] @ x[t], up[e] @ x[t], limit)
    out[:, -1] = _swiglu(x @ matrix(shared[0]).T, x @ matrix(shared[1]).T, limit)


def expert_down(mid: "cp.ndarray", selected: "cp.ndarray", w2: Weight, shared: Weight, out: "cp.ndarray",
                quality: bool = False) -> None:
    """out[t] = sum_s W2[e] mid[t, s], and the shared expert's."""
    down = matrix(w2)
    out[:] = mid[:, -1] @ matrix(shared).T
    for t in range(len(mid)):
        for s, e in enumerate(cp.asnumpy(selected[t]).tolist()):
            out[t] += down[e] @ mid[t, s]


def _swiglu(gate: "cp.ndarray", up: "cp.ndarray", limit: float) -> "cp.ndarray":
    gate = cp.minimum(gate, limit)
    return gate / (1 + cp.exp(-gate)) * cp.clip(up, -limit, limit)


def experts(x: "cp.ndarray", selected: "cp.ndarray", weight: "cp.ndarray", w1: Weight, w3: Weight, w2: Weight,
            shared: tuple[Weight, Weight, Weight], limit: float, out: "cp.ndarray", quality: bool = False) -> None:
    """Gate and up, then down, with the shared expert (w1, w3, w2)."""
    mid = cp.empty((len(x), selected.shape[1] + 1, w1.shape[-2]), cp.float32)
    expert_gate_up(x, selected, weight, w1, w3, shared[:2], limit, mid)
    expert_down(mid, selected, w2, shared[2], out)


def arranged(weight: Weight) -> Weight:
    """As it is."""
    return weight
