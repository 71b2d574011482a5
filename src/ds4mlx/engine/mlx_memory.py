"""What fits: weights, states and working memory in bytes, known before anything is allocated."""
import os
from collections.abc import Callable

import mlx.core as mx

from ds4mlx.engine.mlx_decode import COPIED_BYTES
from ds4mlx.engine.protocol import MemoryPlan
from ds4mlx.errors import DoesNotFit
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4 import schema
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.indexer import SCORE_FLOATS
from ds4mlx.models.deepseek_v4.names import expected_tensors
from ds4mlx.models.deepseek_v4.pages import PAGE_TOKENS, page_count
from ds4mlx.models.deepseek_v4.weights import SPARSE
from ds4mlx.ops import device
from ds4mlx.ops.attend import QUERY_BLOCK

CONTEXT_STEP = 1024     # tokens, of contexts that are proposed
STEPS = 4       # before and after a step, one begun ahead, and one while rows are put together anew
SAMPLED = 32    # bytes of each logit while tokens are drawn: ranks, order, weights and their sums
SHARE = 0.85  # of what the device recommends: the rest is the system's and the client's


def limit_bytes(limit_gb: float | None) -> int:
    """The given limit, or SHARE of Metal's recommended working set, of a CUDA card's memory, or of the machine's."""
    if limit_gb is not None:
        return int(limit_gb * 1e9)
    return int(SHARE * (_recommended() or _card() or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))


def _recommended() -> int:
    """Metal's recommended working set in bytes; 0 on other devices."""
    return mx.device_info().get("max_recommended_working_set_size", 0) if mx.metal.is_available() else 0


def _card() -> int:
    """Memory of the CUDA card in bytes; 0 on other devices."""
    return mx.device_info().get("total_memory", 0) if device() == "cuda" else 0


def reserve(plan_: MemoryPlan) -> None:
    """Tell MLX what to keep: freed buffers up to one chunk's working memory, and on Metal, if all of the plan fits
    the recommended working set, everything resident, so that weights are not paged out between requests.

    The Metal half has not run on a Mac yet.
    """
    mx.set_cache_limit(plan_.scratch_bytes)
    if plan_.total_bytes <= _recommended():
        mx.set_wired_limit(_recommended())


def weights_bytes(file: GGUF, config: Config) -> int:
    """Bytes of weights in memory. Tensors that share bytes count once. On the CPU experts and embedding stay in the
    mapped file: the system drops their pages when it needs them, so they do not count."""
    mapped = SPARSE if device() == "cpu" else ()
    spans = {}
    for name, expected in expected_tensors(config).items():
        if expected.path.rsplit(".", 1)[-1] not in mapped:
            spans[file.tensors[name].offset] = file.tensors[name].nbytes
    return sum(spans.values())


def page_bytes(config: Config, packed: bool) -> list[int]:
    """Bytes of a page in each pool of rows."""
    row, index = schema.attention_row(config, packed), schema.index_row(config, packed)
    return [PAGE_TOKENS // ratio * kind.width * kind.dtype.itemsize for ratio in config.compress_ratios if ratio
            for kind in ((row, index) if ratio == 4 else (row,))]


def session_bytes(config: Config, context: int, packed: bool, most_marks: int) -> int:
    """A full state in whole pages; what it can be rewound to, for a mark holds its own window, frontiers and logits;
    and its part in the steps that are there at once."""
    marks = min(most_marks + 1, context) + 1    # one more while they are thinned, and the state's own
    rows = page_count(context) * sum(page_bytes(config, packed))
    return rows + 4 * context + marks * schema.mark_bytes(config, packed) + STEPS * schema.step_bytes(config, packed)


def scratch_bytes(config: Config, chunk: int, context: int, sessions: int, packed: bool) -> int:
    """Working memory of a prefill chunk at the end of the context: streams and their mix, queries and outputs, experts'
    middle, the largest decoded matrix; keys and scores of one block of queries, index scores, a layer's rows put
    together. An upper estimate, in float32. Beside it the pools' page for nobody, the largest pool once more while it
    grows by half, and what steps begun ahead copy; and what drawing a token for each session sorts."""
    c = config
    per_token = 6 * c.hc_mult * c.hidden_size + 3 * c.num_attention_heads * c.head_dim \
        + 3 * c.num_experts_per_tok * c.moe_intermediate_size
    if 4 in c.compress_ratios:
        per_token += 2 * c.index_n_heads * c.index_head_dim
    chosen = min(c.index_topk, context // 4) if 4 in c.compress_ratios else 0
    seen = 2 * c.sliding_window + max(chosen, context // 128 if 128 in c.compress_ratios else 0)
    attended = QUERY_BLOCK * (4 * c.num_attention_heads * seen + 2 * c.head_dim * chosen)
    rows = max((context // ratio for ratio in c.compress_ratios if ratio), default=0)
    scored = 2 * SCORE_FLOATS if rows > chosen > 0 else 0
    pages = page_bytes(config, packed)
    pools = sum(pages) + max(pages, default=0) * (1 + sessions * page_count(context))
    pools += min(sum(pages) * (1 + sessions * page_count(context)), 2 * COPIED_BYTES)
    drawn = sessions * SAMPLED * c.vocab_size
    return 4 * (chunk * per_token + attended + scored + rows * c.head_dim + 3 * (1 << 25)) + pools + drawn


def plan(file: GGUF, config: Config, context: int, sessions: int, packed: bool, most_marks: int, chunk: int,
         limit: int) -> MemoryPlan:
    """`sessions` full states of `context` tokens beside the weights."""
    return MemoryPlan(weights_bytes(file, config), session_bytes(config, context, packed, most_marks), sessions,
                      scratch_bytes(config, min(chunk, context), context, sessions, packed), limit)


PlanOf = Callable[[int, int], MemoryPlan]   # of a context and a number of sessions


def require(plan_: MemoryPlan, context: int, plan_of: PlanOf | None = None) -> None:
    """Raises DoesNotFit, with the numbers and, by `plan_of`, what would fit, when the plan is over its limit."""
    if plan_.fits:
        return
    gb = 1e9
    raise DoesNotFit(
        f"a context of {context} tokens needs {plan_.total_bytes / gb:.1f} GB (weights {plan_.weights_bytes / gb:.1f}, "
        f"{plan_.sessions} x {plan_.session_bytes / gb:.2f} of state, {plan_.scratch_bytes / gb:.1f} to work in), "
        f"the limit is {plan_.limit_bytes / gb:.1f} GB; "
        f"use {_what_fits(plan_.sessions, context, plan_of) if plan_of else 'a smaller --ctx'}, or raise "
        f"--memory-limit-gb if the machine has the memory")


def require_one_more(plan_: MemoryPlan, open_bytes: int) -> None:
    """Raises DoesNotFit when a session of the plan is over its limit beside others that take `open_bytes`."""
    total = plan_.weights_bytes + open_bytes + plan_.session_bytes + plan_.scratch_bytes
    if total > plan_.limit_bytes:
        raise DoesNotFit(
            f"one more session needs {plan_.session_bytes / 1e9:.2f} GB, {total / 1e9:.1f} GB with weights, the open "
            f"sessions and room to work in; the limit is {plan_.limit_bytes / 1e9:.1f} GB; close a session first")


def _what_fits(sessions: int, context: int, plan_of: PlanOf) -> str:
    """The most sessions of that context, and the largest context for so many sessions."""
    most = max((n for n in range(1, sessions) if plan_of(context, n).fits), default=0)
    low, high = 0, -(-context // CONTEXT_STEP)      # in steps: the larger one does not fit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if plan_of(middle * CONTEXT_STEP, sessions).fits else (low, middle)
    ways = [f"--batched-session {most}"] * (most > 0) + [f"--ctx {low * CONTEXT_STEP}"] * (low > 0)
    return " or ".join(ways) if ways else f"a smaller model: {CONTEXT_STEP} tokens of context do not fit"
