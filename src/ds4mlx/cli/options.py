"""Flags that several commands share, and the settings they add up to."""
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace

from ds4mlx.config import Settings

# Options of ds4 that have nothing to set here. Scripts that pass them go on working.
IGNORED_SWITCHES = ("--metal",)
IGNORED_VALUES = ("-t", "--threads", "--mtp", "--mtp-draft", "--mtp-margin")


def add_model_flags(parser: ArgumentParser) -> None:
    """For every command that reads a model file."""
    group = parser.add_argument_group("model")
    group.add_argument("-m", "--model", metavar="FILE",
                       help="GGUF file, or tiny (./ds4flash.gguf if there is one, else tiny)")
    group.add_argument("--config", metavar="FILE", help="TOML file of settings")
    group.add_argument("--debug", action="store_true", help="show where an error came from")


def add_engine_flags(parser: ArgumentParser) -> None:
    """For commands that load weights and render prompts."""
    add_model_flags(parser)
    group = parser.add_argument_group("engine")
    group.add_argument("-c", "--ctx", metavar="N", help="context in tokens (32768)")
    group.add_argument("--prefill-chunk", metavar="N", help="prompt tokens computed at a time (2048)")
    group.add_argument("--memory-limit-gb", metavar="F", help="refuse to need more (85 %% of what the device has)")
    group.add_argument("--power", metavar="N", help="duty cycle in percent, to keep a machine cool (100)")
    group.add_argument("--warm-weights", action="store_true", default=None,
                       help="read all of the model file at the start, not as it is needed; --engine cuda always does")
    group.add_argument("--dir-steering-file", metavar="FILE",
                       help="steer along the directions of this file, one a layer (README, From Python)")
    group.add_argument("--dir-steering-ffn", metavar="F", help="behind the experts; 1 takes a direction away (1)")
    group.add_argument("--dir-steering-attn", metavar="F", help="behind the attention (0)")
    group.add_argument("--kv-round", metavar="official|none", help="rounding of cached rows (official)")
    group.add_argument("--quality", action="store_true", default=None,
                       help="compute exactly where a faster way rounds more")
    group.add_argument("--engine", metavar="mlx|cuda", help="what computes: MLX, or kernels on a CUDA card (mlx)")
    group.add_argument("--ops", metavar="NAME", help=SUPPRESS)
    group.add_argument("--no-lock", dest="lock", action="store_false", default=None,
                       help="load although another process has a model loaded")
    group.add_argument("--effort-profile", metavar="auto|0731|preview",
                       help="what the checkpoint takes reasoning efforts for (auto)")
    group.add_argument("--prompt-layout", metavar="official|tools-first",
                       help="order of tools and system text (official)")
    group.add_argument(*IGNORED_SWITCHES, dest="ignored", action="append_const", const=IGNORED_SWITCHES[0],
                       help=SUPPRESS)
    for flag in IGNORED_VALUES:
        group.add_argument(flag, dest=f"ignored_{flag}", help=SUPPRESS)


def add_sampling_flags(parser: ArgumentParser) -> None:
    """How tokens are chosen, and how many."""
    group = parser.add_argument_group("sampling")
    group.add_argument("-n", "--tokens", metavar="N", help="most tokens of an answer")
    group.add_argument("--temp", metavar="F", help="temperature; 0: always the likeliest token (what the file "
                       "recommends, else 1)")
    group.add_argument("--top-p", metavar="F", help="(1)")
    group.add_argument("--min-p", metavar="F", help="(0.05)")
    group.add_argument("--top-k", metavar="N", help="0: off (0)")


def add_thinking_flags(parser: ArgumentParser) -> None:
    """Whether and how hard to reason, for a command that asks one question."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--think", dest="think", action="store_const", const="on", help="reason first (default)")
    group.add_argument("--nothink", dest="think", action="store_const", const="off", help="answer at once")
    group.add_argument("--think-level", dest="think", choices=("low", "high", "max"), help="reason that hard")
    group.add_argument("--think-max", dest="think", action="store_const", const="max", help="--think-level max")


def add_state_flags(parser: ArgumentParser) -> None:
    """Where states are kept, for a command that answers and ends: a long prompt need not be computed each time."""
    group = parser.add_argument_group("states to go on from")
    group.add_argument("--kv-disk-dir", metavar="DIR", help="keep states of conversations here (nowhere)")
    group.add_argument("--kv-disk-space-mb", metavar="N", help="most MiB that they may take (4096)")
    group.add_argument("--kv-rewind-points", metavar="N",
                       help="earlier lengths of a conversation that can be gone back to (16)")


def settings_from(args: Namespace) -> Settings:
    """The settings of a parsed command line. Raises UsageError; warns once of options that do nothing."""
    flags = dict(vars(args))
    ignored = [*(flags.get("ignored") or ()), *(flag for flag in IGNORED_VALUES if flags.get(f"ignored_{flag}"))]
    if ignored:
        print(f"ds4mlx {args.command}: {', '.join(ignored)}: accepted for ds4 scripts, without effect here",
              file=sys.stderr)
    think = flags.get("think")
    if think is not None:
        flags["default_thinking"] = think != "off"
        flags["default_effort"] = (think,) if think in ("low", "high", "max") else None
    return Settings.load(args.command, flags)
