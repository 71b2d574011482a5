"""What a step keeps of its tokens, on CUDA: the window's row, and what compressors hold and complete, in one launch.

A launch has parts, each with some blocks of every sequence; what a part writes is a new array, so most of its blocks
copy what stays as it was.
"""
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from ds4mlx.cuda_port.source import Defines
from ds4mlx.ops import cuda_kernel
from ds4mlx.ops.kernel import Output
from ds4mlx.ops.kv_round import Packing, pack_bytes

COPYING = 8             # blocks that copy a window
COPIED_BYTES = 32768    # of a frontier, by a block
# Blocks 0 and 1 make queries and row, the others copy the other rows.
LATENT = """
size_t at = b * windows_shape[1] * ROW, place = position % windows_shape[1];
const unsigned* from = (const unsigned*)((const u8*)windows + at);
unsigned* to = (unsigned*)((u8*)after + at);
if (part == 0) ::normalise(q + b * Q, q_norm, qr + b * Q, Q, EPS, shared);
if (part == 1)
    ::new_row(kv + b * D, kv_norm, cosine + b * (R / 2), sine + b * (R / 2), (u8*)(to + place * (ROW / 4)), EPS,
              shared);
if (part < 2) return;
for (int i = (part - 2) * blockDim.x + threadIdx.x; i < windows_shape[1] * (ROW / 4); i += (BLOCKS - 2) * blockDim.x)
    if (i / (ROW / 4) != place) to[i] = from[i];
"""
# Block 0 makes the row, from the ring as it was and the token; the others copy the ring, with the token.
GROUP = """
typedef ::Pool<RATIO_#, OVERLAP_#, WIDTH_#> Group;
const int columns = Group::COLUMNS, ring = Group::HELD * 2 * columns, c = threadIdx.x;
const float *from = frontiers_# + b * ring, *own_k = k_# + b * columns, *own_s = s_# + b * columns;
Group pool = {from, own_k, own_s, ape_#, position};
if (part == 0) {
    u8* out = (u8*)made_# + b * ROW_#;
    if ((position + 1) % RATIO_#) {
        for (int i = c; i < ROW_#; i += blockDim.x) out[i] = 0;
        return;
    }
    float v = c < WIDTH_# ? pool.pooled(position / RATIO_#, c) : 0.f;
    float scale = rsqrtf(::block_sum(v * v, shared) / WIDTH_# + EPS);
    v = c < WIDTH_# ? v * scale * norm_#[c] : 0.f;
    v = ::rotated<WIDTH_#, R>(v, c, cosine_# + b * (R / 2), sine_# + b * (R / 2));
    __syncthreads();
    STORE_#(out, v, c, shared);
    return;
}
float* to = after_# + b * ring;
for (int i = (part - 1) * blockDim.x + c; i < ring / 4; i += (BLOCKS - 1) * blockDim.x)
    if (4 * i / (2 * columns) != position % Group::HELD) ((float4*)to)[i] = ((const float4*)from)[i];
for (int i = c; part == 1 && i < columns; i += blockDim.x) pool.put(to, position, i, own_k[i], own_s[i]);
"""


@dataclass(frozen=True, slots=True)
class Part:
    """`text` knows `b`, the sequence, its `position`, `part`, which of its `blocks` this is, and the arrays."""
    text: str
    blocks: int
    inputs: dict[str, mx.array]
    outputs: dict[str, Output]
    defines: Defines
    threads: int


def latent_fits(D: int, R: int) -> bool:
    return D % 64 == 0 and D <= 1024 and R % 4 == 0 and R < D and (D - R) % 64 == 0


def group_fits(width: int, R: int, packing: Packing | None) -> bool:
    return width % 64 == 0 and width <= 1024 and R < width and (packing != "fp4" or width & (width - 1) == 0)


def latent_part(q, kv, q_norm, kv_norm, cos, sin, windows) -> Part:
    """As `latent.latent_step`."""
    inputs = {"q": q, "kv": kv, "q_norm": q_norm, "kv_norm": kv_norm, "cosine": cos, "sine": sin, "windows": windows}
    return Part(LATENT, 2 + COPYING, inputs, {"qr": (q.shape, mx.float32), "after": (windows.shape, windows.dtype)}, (),
                kv.shape[1])


def sizes(Q: int, D: int, R: int, row: int, dtype: mx.Dtype) -> Defines:
    """Macros of latent.cu, for rows of so many numbers."""
    return (("D", D), ("R", R), ("ROW", row * dtype.size), ("PACKED", int(dtype == mx.uint8)), ("RATIO", 0),
            ("PAGE_ROWS", 1), ("RING", 1), ("Q", Q))


def group_part(number: int, k, s, frontiers, ape, norm, cos, sin, packing: Packing | None) -> Part:
    """As `compress.compress_token`; parts of one launch have other numbers."""
    (B, held, _, columns), width, R = frontiers.shape, norm.shape[0], 2 * cos.shape[1]
    row, dtype = (pack_bytes(width, R, packing), mx.uint8) if packing else (width, mx.float32)
    store = f"::store_index_row<{width}, true>" if packing == "fp4" else \
        f"::store_row<{width}, {R}, {str(packing is not None).lower()}>"
    macros = {"RATIO": ape.shape[0], "OVERLAP": columns // width, "WIDTH": width, "ROW": row * dtype.size,
             "STORE": store}
    arrays = {"k": k, "s": s, "frontiers": frontiers, "ape": ape, "norm": norm, "cosine": cos, "sine": sin}
    return Part(GROUP.replace("#", str(number)), 1 + -(-8 * held * columns // COPIED_BYTES),
                {f"{name}_{number}": array for name, array in arrays.items()},
                {f"after_{number}": (frontiers.shape, mx.float32), f"made_{number}": ((B, row), dtype)},
                tuple((f"{name}_{number}", value) for name, value in macros.items()), width)


def launch(positions: mx.array, parts: Sequence[Part], row: Defines, eps: float) -> list[mx.array]:
    """The outputs of all parts, in order."""
    texts = ["__shared__ float shared[1024]; const size_t b = blockIdx.y; const int position = positions[b]; "
             "int part = blockIdx.x;"]
    for part in parts:
        text = part.text.replace("EPS", f"{float(eps)!r}f").replace("BLOCKS", str(part.blocks))
        texts.append(f"if (part < {part.blocks}) {{{text}return;\n}}\npart -= {part.blocks};")
    inputs = {"positions": positions} | {name: a for part in parts for name, a in part.inputs.items()}
    outputs = {name: output for part in parts for name, output in part.outputs.items()}
    kernel = cuda_kernel.kernel("latent", "\n".join(texts), tuple(inputs), tuple(outputs),
                                (*row, *(define for part in parts for define in part.defines)),
                                max(part.threads for part in parts))
    return kernel(list(inputs.values()), list(outputs.values()), (sum(part.blocks for part in parts), len(positions)))
