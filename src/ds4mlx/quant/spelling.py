"""How checkpoints spell the tensors of the model: officially; as transformers' modules are named; or between the two.

transformers 5.24 saves official names within a layer behind `model.`, its own above the layers, and `attn.norm` for
`attn.kv_norm`, which its renaming does not find back from.
"""
import re
from collections.abc import Iterator

BARE = ("hc_", "attn_sink", "ape")      # ends of official names without `.weight`
# Ends of official names -> ends in transformers, within a layer. The more particular come first.
LAYER = (
    ("attn.indexer.compressor.", "self_attn.compressor.indexer."),
    ("attn.indexer.weights_proj.", "self_attn.compressor.indexer.scorer.weights_proj."),
    ("attn.indexer.wq_b.", "self_attn.compressor.indexer.q_b_proj."),
    ("attn.compressor.", "self_attn.compressor."),
    ("attn.wq_a.", "self_attn.q_a_proj."), ("attn.wq_b.", "self_attn.q_b_proj."), ("attn.wkv.", "self_attn.kv_proj."),
    ("attn.wo_a.", "self_attn.o_a_proj."), ("attn.wo_b.", "self_attn.o_b_proj."),
    ("attn.q_norm.", "self_attn.q_a_norm."), ("attn.kv_norm.", "self_attn.kv_norm."),
    ("attn.attn_sink", "self_attn.sinks"),
    ("attn_norm.", "input_layernorm."), ("ffn_norm.", "post_attention_layernorm."),
    ("hc_attn_", "attn_hc."), ("hc_ffn_", "ffn_hc."),
    ("ffn.gate.bias", "mlp.gate.e_score_correction_bias"), ("ffn.gate.", "mlp.gate."),
    ("ffn.shared_experts.w1.", "mlp.shared_experts.gate_proj."),
    ("ffn.shared_experts.w2.", "mlp.shared_experts.down_proj."),
    ("ffn.shared_experts.w3.", "mlp.shared_experts.up_proj."),
)
COMPRESSOR = (("wkv.", "kv_proj."), ("wgate.", "gate_proj."), ("norm.", "kv_norm."), ("ape", "position_bias"))
TOP = {"embed.weight": "embed_tokens.weight", "norm.weight": "norm.weight", "hc_head_fn": "hc_head.hc_fn",
       "hc_head_base": "hc_head.hc_base", "hc_head_scale": "hc_head.hc_scale"}


def official_name(path: str, expert: int | None = None) -> str:
    """The published name of a path of `names.Expected`, of one expert if it is a stack's."""
    path = re.sub(r"\.experts_(w\d)$", rf".experts.{expert}.\1", path)
    path = re.sub(r"\.shared_(w\d)$", r".shared_experts.\1", path)
    if path.endswith((".gate_bias", ".gate_tid2eid")):
        return path.replace(".gate_", ".gate.")
    return path if path.rsplit(".", 1)[-1].startswith(BARE) else f"{path}.weight"


def spellings(official: str) -> Iterator[str]:
    """The names that a tensor may have."""
    yield official
    yield f"model.{official}"
    if official == "head.weight":
        yield "lm_head.weight"
    elif official in TOP:
        yield f"model.{TOP[official]}"
    elif (found := re.fullmatch(r"layers\.(\d+)\.(.*)", official)) is not None:
        yield f"model.layers.{found[1]}.{_in_layer(found[2])}"
        if found[2] == "attn.kv_norm.weight":
            yield f"model.layers.{found[1]}.attn.norm.weight"


def _in_layer(name: str) -> str:
    for ours, theirs in LAYER:
        if name.startswith(ours):
            rest = name.removeprefix(ours)
            if ours.endswith("compressor."):
                rest = next((there + rest.removeprefix(here) for here, there in COMPRESSOR if rest.startswith(here)),
                            rest)
            return theirs + rest
    return name


def expert_stack(path: str) -> tuple[str, int, int] | None:
    """Where transformers keeps a path's experts: the name, and which part of each one's rows, of how many.

    None for a path that is no stack of experts.
    """
    found = re.fullmatch(r"layers\.(\d+)\.ffn\.experts_(w\d)", path)
    if found is None:
        return None
    name, part, of = {"w1": ("gate_up_proj", 0, 2), "w3": ("gate_up_proj", 1, 2), "w2": ("down_proj", 0, 1)}[found[2]]
    return f"model.layers.{found[1]}.mlp.experts.{name}", part, of
