"""Making the hyper-connections' mixes doubly stochastic: 39 normalisations of a 4 x 4 matrix for every token.

In plain PyTorch each is a kernel or a chain that compiles slowly; the kernel here does all of them in registers. Its
gradient is that of the limit of the iterations, which after twenty is near enough to train by.
"""
import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # no GPU, then
    triton = None

BACKWARD_ITERATIONS = 12
BLOCK = 64      # tokens of a program


def sinkhorn(a: Tensor, iterations: int, eps: float) -> Tensor:
    """M = softmax(a over the last axis) + eps, then columns, and `iterations` - 1 times rows and columns, are divided
    by their sums + eps. a [T, 4, 4] f32, first axis the source stream. Returns [T, 4, 4] f32."""
    if a.is_cuda and triton is not None:
        return _kernels(a, iterations, eps)
    m = torch.softmax(a, dim=-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


@torch.library.custom_op("ds4mlx::sinkhorn", mutates_args=())
def _kernels(a: Tensor, iterations: int, eps: float) -> Tensor:
    a = a.contiguous()
    m = torch.empty_like(a)
    _forward[(triton.cdiv(a.shape[0], BLOCK),)](a, m, a.shape[0], iterations, eps, BLOCK, num_warps=2)
    return m


@_kernels.register_fake
def _(a: Tensor, iterations: int, eps: float) -> Tensor:
    return torch.empty_like(a, memory_format=torch.contiguous_format)


@torch.library.custom_op("ds4mlx::sinkhorn_backward", mutates_args=())
def _backward_kernels(m: Tensor, g: Tensor) -> Tensor:
    g = g.contiguous()
    d = torch.empty_like(m)
    _backward[(triton.cdiv(m.shape[0], BLOCK),)](m, g, d, m.shape[0], BACKWARD_ITERATIONS, BLOCK, num_warps=2)
    return d


@_backward_kernels.register_fake
def _(m: Tensor, g: Tensor) -> Tensor:
    return torch.empty_like(m)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(output)


def _gradient(ctx, g: Tensor) -> tuple[Tensor, None, None]:
    return _backward_kernels(ctx.saved_tensors[0], g), None, None


_kernels.register_autograd(_gradient, setup_context=_save)


def limit_gradient(m: Tensor, g: Tensor, iterations: int = BACKWARD_ITERATIONS) -> Tensor:
    """What the backward kernel computes: M (g - u 1' - 1 v'), with u and v such that its rows and columns sum to 0."""
    v = torch.zeros_like(m[..., :1, :])
    for _ in range(iterations):
        u = (m * (g - v)).sum(-1, keepdim=True) / m.sum(-1, keepdim=True)
        v = (m * (g - u)).sum(-2, keepdim=True) / m.sum(-2, keepdim=True)
    return m * (g - u - v)


if triton is not None:
    @triton.jit
    def _forward(a, m, tokens, iterations, eps, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = t[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        there = (t < tokens)[:, None, None]
        x = tl.load(a + at, mask=there, other=0.0)
        x = tl.exp(x - tl.max(x, axis=2)[:, :, None])
        x = x / tl.sum(x, axis=2)[:, :, None] + eps
        x = x / (tl.sum(x, axis=1)[:, None, :] + eps)
        for _ in range(iterations - 1):
            x = x / (tl.sum(x, axis=2)[:, :, None] + eps)
            x = x / (tl.sum(x, axis=1)[:, None, :] + eps)
        tl.store(m + at, x, mask=there)

    @triton.jit
    def _backward(m, g, d, tokens, iterations, BLOCK: tl.constexpr):
        t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        at = t[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :]
        there = (t < tokens)[:, None, None]
        x = tl.load(m + at, mask=there, other=0.25)
        dx = tl.load(g + at, mask=there, other=0.0)
        rows, columns = tl.sum(x, axis=2), tl.sum(x, axis=1)
        u = tl.sum(x * dx, axis=2) / rows
        v = tl.sum(x * (dx - u[:, :, None]), axis=1) / columns
        for _ in range(iterations - 1):
            u = tl.sum(x * (dx - v[:, None, :]), axis=2) / rows
            v = tl.sum(x * (dx - u[:, :, None]), axis=1) / columns
        tl.store(d + at, x * (dx - u[:, :, None] - v[:, None, :]), mask=there)
