"""Operations on the card: each checks nothing, allocates nothing that a caller could give, and launches on the current
stream, so that a step of them can be captured. Arguments and results are defined by the operations of `ds4mlx.ops`."""
from ds4mlx.cuda_port.ops.attend import Rows, attend
from ds4mlx.cuda_port.ops.compress import compress
from ds4mlx.cuda_port.ops.dense_matmul import dense
from ds4mlx.cuda_port.ops.dequantize import arranged
from ds4mlx.cuda_port.ops.expert_matmul import experts
from ds4mlx.cuda_port.ops.hyper_mix import Connection, Update, WayBack, hyper_mix
from ds4mlx.cuda_port.ops.indexer_topk import choose_rows
from ds4mlx.cuda_port.ops.latent import Compressor, Norms, keep_rows, latent, latent_step
from ds4mlx.cuda_port.ops.rope_tail import embed, group_tables, tables
from ds4mlx.cuda_port.ops.route import route, route_step
from ds4mlx.cuda_port.ops.sample import keep, sample

__all__ = ["Compressor", "Connection", "Norms", "Rows", "Update", "WayBack", "arranged", "attend", "choose_rows",
           "compress", "dense", "embed", "experts", "group_tables", "hyper_mix", "keep", "keep_rows", "latent",
           "latent_step", "route", "route_step", "sample", "tables"]
