"""One file an op: what it computes, its checks, the reference in plain MLX, and the choice of implementation."""
from ds4mlx.ops.attend import attention, attention_step
from ds4mlx.ops.compress import compress_step, compress_token
from ds4mlx.ops.cuda_kernel import prepared
from ds4mlx.ops.dense_matmul import dense_matmul, dense_matmuls
from ds4mlx.ops.dequantize import arrange, dequantize
from ds4mlx.ops.dispatch import device, only, use
from ds4mlx.ops.expert_matmul import expert_down, expert_gate_up, swiglu
from ds4mlx.ops.hyper_mix import hyper_enter, hyper_input, hyper_leave, hyper_mix, hyper_output
from ds4mlx.ops.indexer_topk import index_queries, index_scores, index_scores_step, select_rows
from ds4mlx.ops.keep import Group, keep_step
from ds4mlx.ops.kv_round import fp4_pack, fp4_unpack, fp8_pack, fp8_unpack, pack_bytes
from ds4mlx.ops.latent import latent, latent_step
from ds4mlx.ops.paged import Paged
from ds4mlx.ops.rope_tail import rope_tail
from ds4mlx.ops.route import route
from ds4mlx.ops.sample import sample
from ds4mlx.ops.weights import Blocks

__all__ = ["Blocks", "Group", "Paged", "arrange", "attention", "attention_step", "compress_step", "compress_token",
           "dense_matmul", "dense_matmuls", "dequantize", "device", "expert_down", "expert_gate_up", "fp4_pack",
           "fp4_unpack", "fp8_pack", "fp8_unpack", "hyper_enter", "hyper_input", "hyper_leave", "hyper_mix",
           "hyper_output", "index_queries", "index_scores", "index_scores_step", "keep_step", "latent", "latent_step",
           "only", "pack_bytes", "prepared", "rope_tail", "route", "sample", "select_rows", "swiglu", "use"]
