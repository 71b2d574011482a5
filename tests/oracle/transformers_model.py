"""The tiny model in transformers (torch, CPU, float32): built from `weights.py`, run whole or in chunks, watched.

Used only to regenerate the stored expectations; no test imports it.
"""
import math
from types import TracebackType

import numpy as np
import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from oracle.weights import CONFIG, EXPERTS, weights

LAYER_TYPES = ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention",
                                           "compressed_sparse_attention"]

# Official name within a layer -> name in transformers; routed experts are stacked apart.
LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight", "ffn_norm.weight": "post_attention_layernorm.weight",
    "hc_attn_fn": "attn_hc.fn", "hc_attn_base": "attn_hc.base", "hc_attn_scale": "attn_hc.scale",
    "hc_ffn_fn": "ffn_hc.fn", "hc_ffn_base": "ffn_hc.base", "hc_ffn_scale": "ffn_hc.scale",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight", "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight", "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight", "attn.attn_sink": "self_attn.sinks",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight", "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    "ffn.gate.weight": "mlp.gate.weight", "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid", "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}
for _ours, _theirs in (("attn.compressor", "self_attn.compressor"),
                       ("attn.indexer.compressor", "self_attn.compressor.indexer")):
    LAYER_NAMES |= {f"{_ours}.wkv.weight": f"{_theirs}.kv_proj.weight", f"{_ours}.ape": f"{_theirs}.position_bias",
                    f"{_ours}.wgate.weight": f"{_theirs}.gate_proj.weight",
                    f"{_ours}.norm.weight": f"{_theirs}.kv_norm.weight"}
TOP_NAMES = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight",
             "norm.weight": "model.norm.weight", "hc_head_fn": "model.hc_head.hc_fn",
             "hc_head_base": "model.hc_head.hc_base", "hc_head_scale": "model.hc_head.hc_scale"}


def configuration() -> DeepseekV4Config:
    """CONFIG as transformers spells it. The layer pattern is checked: its default is another model's."""
    fields = {key: value for key, value in CONFIG.items() if key not in ("architectures", "torch_dtype", "model_type")}
    rope = dict(fields.pop("rope_scaling"))
    rope["rope_type"] = rope.pop("type")
    config = DeepseekV4Config(rope_parameters=rope, **fields)
    config._attn_implementation = "eager"
    assert config.layer_types == LAYER_TYPES and config.mlp_layer_types == ["hash_moe"] * 3 + ["moe"] * 2
    return config


def build(seed: int) -> hf.DeepseekV4ForCausalLM:
    """The model holding `weights(seed)`; every parameter and table of transformers is covered exactly once."""
    model = hf.DeepseekV4ForCausalLM(configuration()).eval().float()
    report = model.load_state_dict(state_dict(weights(seed)), strict=False)
    assert not report.unexpected_keys, report.unexpected_keys
    assert all("inv_freq" in name for name in report.missing_keys), report.missing_keys
    return model


def state_dict(official: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    made = {theirs: official[ours] for ours, theirs in TOP_NAMES.items()}
    for layer in range(len(LAYER_TYPES)):
        ours, theirs = f"layers.{layer}.", f"model.layers.{layer}."
        made |= {theirs + their: official[ours + our] for our, their in LAYER_NAMES.items() if ours + our in official}
        w1, w2, w3 = (np.stack([official[f"{ours}ffn.experts.{e}.{w}.weight"] for e in range(EXPERTS)])
                      for w in ("w1", "w2", "w3"))
        made[theirs + "mlp.experts.gate_up_proj"] = np.concatenate([w1, w3], axis=1)
        made[theirs + "mlp.experts.down_proj"] = w2
    return {name: torch.from_numpy(array) for name, array in made.items()}


class Taps:
    """While entered, records what each layer returns and how far each top-k choice is from a tie.

    hidden: one [T, 4, D] per layer. indexer_margin, router_margin: smallest gap between the last chosen and the first
    rejected candidate, infinity where nothing was rejected. Valid for one-shot runs.
    """

    def __init__(self, model: hf.DeepseekV4ForCausalLM) -> None:
        self.model = model
        self.hidden: list[torch.Tensor] = []
        self.indexer_margin = self.router_margin = math.inf

    def __enter__(self) -> "Taps":
        self.hooks = []
        for layer in self.model.model.layers:
            self.hooks.append(layer.register_forward_hook(lambda module, args, out: self.hidden.append(out[0])))
            if isinstance(layer.mlp.gate, hf.DeepseekV4TopKRouter):
                self.hooks.append(layer.mlp.gate.register_forward_hook(self._router))
            if hasattr(layer.self_attn.compressor, "indexer"):
                self.hooks.append(layer.self_attn.compressor.indexer.scorer.register_forward_hook(self._indexer))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for hook in self.hooks:
            hook.remove()

    def _router(self, gate: torch.nn.Module, args: object, out: tuple[torch.Tensor, ...]) -> None:
        ranked = (gate.score_fn(out[0]) + gate.e_score_correction_bias).sort(dim=-1, descending=True).values
        gap = ranked[:, gate.top_k - 1] - ranked[:, gate.top_k]
        self.router_margin = min(self.router_margin, gap.min().item())

    def _indexer(self, scorer: torch.nn.Module, args: object, out: torch.Tensor) -> None:
        chosen, scores = int(CONFIG["index_topk"]), out[0]
        visible = (torch.arange(len(scores)) + 1) // 4
        unseen = torch.arange(scores.shape[1]) >= visible[:, None]
        ranked = scores.masked_fill(unseen, -math.inf)[visible > chosen].sort(dim=-1, descending=True).values
        if len(ranked):
            gap = ranked[:, chosen - 1] - ranked[:, chosen]
            self.indexer_margin = min(self.indexer_margin, gap.min().item())


@torch.no_grad()
def one_shot(model: hf.DeepseekV4ForCausalLM, ids: list[int]) -> tuple[torch.Tensor, Taps]:
    """Logits [T, V] and what was seen on the way."""
    with Taps(model) as taps:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits, taps


@torch.no_grad()
def in_chunks(model: hf.DeepseekV4ForCausalLM, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logits [T, V] of a cached run in chunks of these sizes; the last size repeats."""
    cache, rows, start = DynamicCache(config=model.config), [], 0
    while start < len(ids):
        size = sizes[min(len(rows), len(sizes) - 1)]
        chunk = torch.tensor([ids[start:start + size]])
        rows.append(model(input_ids=chunk, cache=cache, use_cache=True).logits[0])
        start += size
    return torch.cat(rows)
