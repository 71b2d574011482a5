"""Which type each tensor gets: a named recipe, a TOML file, and overrides of whole families.

Routed experts give a file its size; all else has the types of published files unless a recipe says otherwise.
"""
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from ds4mlx.errors import UsageError
from ds4mlx.gguf.blocks import BLOCK_TYPES
from ds4mlx.models.deepseek_v4.names import TABLE, VECTOR, Expected

BETTER_LAYERS = 6   # last ones, in q2-q4
STORED = "stored"   # a type of recipes: what the checkpoint has, where GGUF has it
# Form in a checkpoint -> type that holds it without rounding. GGUF has no FP8: its matrices become Q8_0, or where the
# model takes none, what published files have.
AS_STORED = {"FP4": "MXFP4", "FP8": "Q8_0", "BF16": "BF16", "F16": "F16", "F32": "F32", "I32": "I32", "I64": "I32"}
FAMILIES: dict[str, Callable[[str], bool]] = {
    "experts": lambda name: "_exps." in name,
    "routed_w2": lambda name: "ffn_down_exps." in name,
    "attention": lambda name: any(f".{part}.weight" in name for part in (
        "attn_q_a", "attn_q_b", "attn_kv", "attn_output_a", "attn_output_b")),
    "shared": lambda name: "_shexp." in name,
    "output": lambda name: name == "output.weight",
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """Types by pattern of GGUF name; of those that match the last one counts. `name` goes into the file."""
    name: str
    patterns: tuple[tuple[str, str], ...] = ()
    better: str | None = None   # of the experts of the last BETTER_LAYERS layers
    own: tuple[tuple[str, str], ...] = ()   # patterns of a file, which count more
    overrides: Mapping[str, str] = field(default_factory=dict)  # family -> type

    def kind(self, name: str, need: Expected, form: str, layers: int) -> str:
        """The type of one tensor, which the checkpoint stores as `form`. Raises UsageError where it cannot be."""
        chosen = need.kinds[0]
        if need.kinds not in (VECTOR, TABLE):  # those have one type only
            chosen = _last_match(self.patterns, name, chosen)
            if self.better and FAMILIES["experts"](name) and int(name.split(".")[1]) >= layers - BETTER_LAYERS:
                chosen = self.better
            chosen = _last_match(self.own, name, chosen)
            for family, kind in self.overrides.items():
                chosen = kind if FAMILIES[family](name) else chosen
        if chosen == STORED:
            chosen = AS_STORED[form] if form != "FP8" or "Q8_0" in need.kinds else need.kinds[0]
        if chosen not in need.kinds:
            raise UsageError(f"recipe {self.name}: {name} as {chosen} is not for this model, which takes "
                             f"{', '.join(need.kinds)}")
        weights = BLOCK_TYPES[chosen].weights
        if need.shape[-1] % weights:
            raise UsageError(f"recipe {self.name}: {name} has rows of {need.shape[-1]} weights, {chosen} needs a "
                             f"multiple of {weights}")
        return chosen

    def describe(self) -> str:
        """For the file: the name, and what was given beside it."""
        own = [f"{pattern}={kind}" for pattern, kind in (*self.own, *self.overrides.items())]
        return " ".join([self.name, *own])


def _last_match(patterns: tuple[tuple[str, str], ...], name: str, otherwise: str) -> str:
    return next((kind for pattern, kind in reversed(patterns) if fnmatchcase(name, pattern)), otherwise)


def _experts(gate_up: str, down: str) -> tuple[tuple[str, str], ...]:
    return ("*_exps.weight", gate_up), ("*ffn_down_exps.weight", down)


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in (
    Recipe("q2", _experts("IQ2_XXS", "Q2_K")),
    Recipe("q2-q4", _experts("IQ2_XXS", "Q2_K"), better="Q4_K"),
    Recipe("q4", _experts("Q4_K", "Q4_K")),
    Recipe("q8", _experts("Q8_0", "Q8_0")),
    Recipe("f16", (("*", "F16"),)),
    Recipe("native", (("*", STORED),)),
)}


def recipe(named: str, overrides: Mapping[str, str | None] | None = None) -> Recipe:
    """A recipe by its name or from a TOML file. Raises UsageError.

    A file has `base`, one of the names, and `[tensors]`, patterns of GGUF names with a type each:

        base = "q2"
        [tensors]
        "blk.4?.ffn_*_exps.weight" = "Q4_K"
        "output.weight" = "F16"
    """
    found = RECIPES.get(named) or _from_file(Path(named))
    given = {family: kind for family, kind in (overrides or {}).items() if kind is not None}
    for family, kind in given.items():
        _check_kind(kind, f"--{family.replace('_', '-')}")
    return replace(found, overrides=given)


def _from_file(path: Path) -> Recipe:
    import tomllib
    if path.suffix != ".toml":
        raise UsageError(f"--recipe is {str(path)[:80]!r}, need one of {', '.join(RECIPES)} or a file *.toml")
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as fault:
        raise UsageError(f"--recipe {path}: {fault.strerror}; give the path of a TOML file") from fault
    except ValueError as fault:
        raise UsageError(f"--recipe {path}: not TOML in UTF-8 ({fault}); correct the file") from fault
    base, tensors = content.pop("base", "q2"), content.pop("tensors", {})
    if content or base not in RECIPES or not isinstance(tensors, dict):
        raise UsageError(f"--recipe {path}: needs base, one of {', '.join(RECIPES)}, and [tensors] with a type for "
                         f"each pattern; found {', '.join(content) or repr(base)[:80]}")
    for pattern, kind in tensors.items():
        _check_kind(kind, f"--recipe {path}: {pattern}")
    return replace(RECIPES[base], name=path.stem, own=tuple(tensors.items()))


def _check_kind(kind: object, told: str) -> None:
    if kind != STORED and (not isinstance(kind, str) or kind not in BLOCK_TYPES):
        raise UsageError(f"{told} is {str(kind)[:40]!r}, need one of {', '.join(BLOCK_TYPES)} or {STORED}")
