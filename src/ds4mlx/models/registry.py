"""Model families: one line each, from a GGUF's `general.architecture` to the folder that runs it."""
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

from ds4mlx.errors import ModelFileError


@dataclass(frozen=True, slots=True)
class Family:
    """A folder of this package with the roles config, names, schema, weights. Nothing is imported until asked for."""
    architecture: str
    package: str

    def role(self, name: str) -> ModuleType:
        """The module of one role. "weights" needs MLX, the others do not."""
        return import_module(f"{self.package}.{name}")


FAMILIES: dict[str, Family] = {family.architecture: family for family in (
    Family("deepseek4", "ds4mlx.models.deepseek_v4"),
)}


MAX_LABEL = 200  # characters


def family_of(metadata: Mapping[str, object]) -> Family:
    """The family of a model file, by its architecture or, where it has none, by its keys.

    Raises ModelFileError if none runs it.
    """
    found = metadata.get("general.architecture")
    if found is None:
        found = next((name for name in FAMILIES if any(key.startswith(f"{name}.") for key in metadata)), None)
    family = FAMILIES.get(found) if isinstance(found, str) else None
    if family is None:
        shown = repr(found[:80]) if isinstance(found, str) else "absent" if found is None else "no text"
        raise ModelFileError(f"general.architecture is {shown}, need one of {', '.join(FAMILIES)};"
                             " give a DeepSeek V4 Flash file")
    return family


def label(metadata: Mapping[str, object], key: str) -> str:
    """A name in a model file, fit for a terminal: it must not move its cursor, or fill it. "" where there is none."""
    value = metadata.get(key)
    if not isinstance(value, str):
        return ""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in value[:MAX_LABEL])
