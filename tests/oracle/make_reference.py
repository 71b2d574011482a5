"""Regenerate the expectations beside this file. Needs torch 2.13 (CPU) and transformers 5.24; tests need neither.

Run from tests/:

    python -m oracle.make_reference               write expected.npz, units.safetensors and report.json
    python -m oracle.make_reference --check       compute them again; exit 1 where they differ from the files
    python -m oracle.make_reference --units-only  write units.safetensors alone
    python -m oracle.make_reference --scan 20     only print how far the choices of 20 seeds are from a tie
"""
import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from oracle.official_rounding import fp8, hadamard_fp4, rounded_memory
from oracle.transformers_model import build, configuration, in_chunks, one_shot
from oracle.weights import SEED, prompts

HERE = Path(__file__).parent
CHUNKINGS = {"1": [1], "37": [37], "128": [128], "1_3_97_rest": [1, 3, 97, 10 ** 9]}
LONGEST_ROUNDED = 300  # rounding is discontinuous: beyond this, correct implementations drift apart
INDEXER_MARGIN, ROUTER_MARGIN = 1e-4, 2e-4  # float32 noise before the choices is below 2e-5
CHECK_TOLERANCE = 1e-4  # other processors and thread counts sum in another order
# Ends of groups of 4 and 128, eviction from the window, and the last position of each prompt.
HIDDEN_POSITIONS = (0, 3, 4, 7, 63, 126, 127, 128, 129, 131, 132, 255, 256, 299, 511, 512, 639, 699)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--units-only", action="store_true")
    parser.add_argument("--scan", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=SEED, help="first seed of --scan")
    args = parser.parse_args()
    torch.use_deterministic_algorithms(True)
    if args.scan:
        scan(range(args.seed, args.seed + args.scan))
    elif args.check:
        sys.exit(check(units() | expectations()[0]))
    else:
        save_file(units(), HERE / "units.safetensors")
        if not args.units_only:
            expected, report = expectations()
            np.savez_compressed(HERE / "expected.npz", **expected)
            (HERE / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def scan(seeds: range) -> None:
    """Print the smallest margins of each seed, longest prompt first; a seed is given up at its first narrow margin."""
    for seed in seeds:
        model, indexer, router, narrow = build(seed), math.inf, math.inf, False
        for ids in reversed(prompts(seed).values()):
            if not narrow:
                _, taps = one_shot(model, ids)
                indexer, router = min(indexer, taps.indexer_margin), min(router, taps.router_margin)
                narrow = indexer < INDEXER_MARGIN or router < ROUTER_MARGIN
        print(f"seed {seed}: indexer {indexer:.2g}, router {router:.2g}, {'narrow' if narrow else 'wide'}", flush=True)


def check(made: dict[str, np.ndarray]) -> int:
    """0 when every array of the stored files is there again within CHECK_TOLERANCE, else 1."""
    with np.load(HERE / "expected.npz") as expected:
        stored = load_file(HERE / "units.safetensors") | dict(expected)
    assert set(stored) == set(made), set(stored) ^ set(made)
    worst = max(float(np.abs(stored[name].astype(np.float64) - made[name]).max()) for name in made)
    print(f"largest difference from the stored files: {worst:.3g}, allowed {CHECK_TOLERANCE}")
    return 0 if worst < CHECK_TOLERANCE else 1


def expectations() -> tuple[dict[str, np.ndarray], dict[str, object]]:
    """Arrays of expected.npz and the content of report.json."""
    model, arrays, figures = build(SEED), {}, {}
    for length, ids in prompts(SEED).items():
        logits, taps = one_shot(model, ids)
        kept = [position for position in HIDDEN_POSITIONS if position < length]
        with rounded_memory():
            rounded, _ = one_shot(model, ids)
            rounded_chunks = in_chunks(model, ids, [37])
        arrays |= {f"p{length}.input_ids": np.array(ids, np.int32), f"p{length}.logits": logits.numpy(),
                   f"p{length}.hidden_positions": np.array(kept, np.int32),
                   f"p{length}.hidden": torch.stack([layer[kept] for layer in taps.hidden]).numpy()}
        if length <= LONGEST_ROUNDED:
            arrays[f"p{length}.logits_lowp"] = rounded.numpy()
        figures[str(length)] = {
            "logit_std": logits.std().item(), "distinct_argmax": logits.argmax(-1).unique().numel(),
            "min_indexer_margin": taps.indexer_margin if math.isfinite(taps.indexer_margin) else None,
            "min_router_margin": taps.router_margin,
            "max_difference_in_chunks_of": {name: difference(in_chunks(model, ids, sizes), logits)
                                            for name, sizes in CHUNKINGS.items()},
            "rounded_against_plain": {"max_difference": difference(rounded, logits),
                                      "argmax_agreement": agreement(rounded, logits)},
            "rounded_in_chunks_of_37": {"max_difference": difference(rounded_chunks, rounded),
                                        "rows_off_by_1e-3": rows_off(rounded_chunks, rounded)}}
        print(length, json.dumps(figures[str(length)]), flush=True)
    return arrays, {"seed": SEED, "torch": torch.__version__, "transformers": transformers.__version__,
                    "prompts": figures}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


def agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a.argmax(-1) == b.argmax(-1)).float().mean().item()


def rows_off(a: torch.Tensor, b: torch.Tensor) -> int:
    return int(((a - b).abs().amax(-1) > 1e-3).sum())


@torch.no_grad()
def units() -> dict[str, np.ndarray]:
    """Known answers of single operations, which a whole-model comparison is too blunt to check."""
    random = torch.Generator().manual_seed(7)
    made = hyper_unit(random) | rope_unit()
    spread = [torch.randn(64, width, generator=random) * torch.exp2(torch.randint(-20, 12, (64, 1), generator=random))
              for width in (192, 128)]
    rows, index_rows = spread
    rows[0], rows[1] = 0, 1e-6  # below the smallest scale
    rows[2, :64], rows[3, :64] = torch.linspace(-448, 448, 64), torch.arange(64) / 16.0  # ends, ties and subnormals
    index_rows[:2] = 0
    index_rows[1, 5] = 3.0
    logits = torch.randn(16, 8, generator=random) * 6
    made |= {"fp8.in": rows, "fp8.out": fp8(rows, 64), "fp4.in": index_rows, "fp4.out": hadamard_fp4(index_rows),
             "router.logits": logits, "router.prob": torch.nn.functional.softplus(logits.double()).sqrt().float()}
    return {name: tensor.numpy() for name, tensor in made.items()}


def hyper_unit(random: torch.Generator) -> dict[str, torch.Tensor]:
    """One hyper-connection whose mixing logits are sharp, so that number and order of Sinkhorn passes show."""
    hyper = hf.DeepseekV4HyperConnection(
        DeepseekV4Config(hidden_size=16, num_hidden_layers=2, compress_ratios=[0, 0])).float()
    hyper.fn.copy_(torch.randn(24, 64, generator=random))
    hyper.base.copy_(torch.randn(24, generator=random))
    hyper.scale.copy_(torch.tensor([0.5, 0.5, 1.0]))
    streams = torch.randn(1, 32, 4, 16, generator=random)
    post, comb, collapsed = hyper(streams)
    return {"hc.streams": streams[0], "hc.fn": hyper.fn, "hc.base": hyper.base, "hc.scale": hyper.scale,
            "hc.post": post[0], "hc.comb": comb[0], "hc.collapsed": collapsed[0]}


def rope_unit() -> dict[str, torch.Tensor]:
    """Both rotary tables at near and far positions, in float64 from transformers' float32 frequencies."""
    positions = torch.tensor([0, 1, 2, 127, 128, 699, 4095, 65535, 65536, 262143, 1048575])
    rotary = hf.DeepseekV4RotaryEmbedding(configuration())
    made = {"rope.positions": positions.to(torch.int32)}
    for kind in ("main", "compress"):
        frequencies = getattr(rotary, f"{kind}_inv_freq")
        angle = positions.double()[:, None] * frequencies.double()
        made |= {f"rope.{kind}.inv_freq": frequencies, f"rope.{kind}.cos": angle.cos().float(),
                 f"rope.{kind}.sin": angle.sin().float()}
    return made


if __name__ == "__main__":
    main()
