"""What fits: weights, states and working memory in bytes, known before anything is allocated."""
from ds4mlx.cuda_port.device import cupy as cp
from ds4mlx.cuda_port.ops.indexer_topk import SCORE_FLOATS
from ds4mlx.cuda_port.sizes import Sizes
from ds4mlx.cuda_port.state import Layout
from ds4mlx.engine.protocol import SPAN_TOKENS, MemoryPlan
from ds4mlx.errors import DoesNotFit
from ds4mlx.gguf.reader import GGUF
from ds4mlx.models.deepseek_v4.config import Config
from ds4mlx.models.deepseek_v4.names import expected_tensors

SHARE = 0.95            # of what is free on the card: the rest is the driver's, and fragmentation
DECODED_WEIGHTS = 1 << 28   # halves of a matrix that prefill decodes at once


def limit_bytes(limit_gb: float | None) -> int:
    """The given limit, or SHARE of the card's free memory."""
    return int(limit_gb * 1e9) if limit_gb is not None else int(SHARE * cp.cuda.Device().mem_info[0])


def weights_bytes(file: GGUF, config: Config) -> int:
    """Tensors that share bytes count once."""
    spans = {file.tensors[name].offset: file.tensors[name].nbytes for name in expected_tensors(config)}
    return sum(spans.values())


def session_bytes(config: Config, sizes: Sizes, context: int, most_marks: int) -> int:
    """A full state, and the copies of its slot that it can be rewound to."""
    layout = Layout.of(config, sizes)
    return (-(-context // SPAN_TOKENS) * layout.page_bytes
            + (2 + most_marks) * (layout.slot_bytes + 4 * config.vocab_size))


def scratch_bytes(config: Config, chunk: int, context: int) -> int:
    """Working memory of a chunk, and of a step of 16 rows, whose attention is split: in float32, an upper estimate."""
    c = config
    per_token = (c.hc_mult + 4) * c.hidden_size + 2 * c.num_attention_heads * c.head_dim \
        + 2 * c.o_groups * c.o_lora_rank + 2 * (c.num_experts_per_tok + 1) * (c.moe_intermediate_size + c.hidden_size) \
        + 2 * c.index_n_heads * c.index_head_dim
    scores = min(SCORE_FLOATS, chunk * max(context // 4, 1))
    split = 16 * 16 * c.num_attention_heads * c.head_dim
    return 4 * (chunk * per_token + scores + split + 17 * c.vocab_size) + 2 * DECODED_WEIGHTS


def plan(file: GGUF, config: Config, sizes: Sizes, context: int, sessions: int, most_marks: int, chunk: int,
         limit: int) -> MemoryPlan:
    """`sessions` full states of `context` tokens beside the weights."""
    return MemoryPlan(weights_bytes(file, config), session_bytes(config, sizes, context, most_marks), sessions,
                      scratch_bytes(config, min(chunk, context), context), limit)


def require(plan_: MemoryPlan, context: int) -> None:
    """Raises DoesNotFit, with the numbers, when the plan is over its limit."""
    if plan_.fits:
        return
    gb = 1e9
    raise DoesNotFit(
        f"a context of {context} tokens needs {plan_.total_bytes / gb:.1f} GB on the card (weights "
        f"{plan_.weights_bytes / gb:.1f}, {plan_.sessions} x {plan_.session_bytes / gb:.2f} of state, "
        f"{plan_.scratch_bytes / gb:.1f} to work in), {plan_.limit_bytes / gb:.1f} GB are to be had; use a smaller "
        f"--ctx, or a card with more memory")
