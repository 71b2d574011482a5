"""The built-in models by their names: `tiny`, which has learned, and `noise`, which is random."""
from importlib import resources
from pathlib import Path

from ds4mlx.errors import ModelFileError

TINY, NOISE = Path("tiny"), Path("noise")
BUILT_IN = (TINY, NOISE)
FILE = "ds4mlx-tiny.gguf"   # in this package


def path_of(name: Path) -> Path:
    """The GGUF file of one of BUILT_IN; that of noise is written on first use. Raises ModelFileError."""
    assert name in BUILT_IN, name
    if name == NOISE:
        from ds4mlx.tiny.noise.build import cached
        return cached()
    if (path := trained()).exists():
        return path
    raise ModelFileError(f"{path}: the built-in model is not there, but belongs to the repository and every package; "
                         "get it again by `git checkout src/ds4mlx/tiny`, install ds4mlx anew, or take --model noise, "
                         "whose text means nothing")


def trained() -> Path:
    """Where the file of the model that has learned lies."""
    return Path(str(resources.files("ds4mlx.tiny") / FILE))


def is_built_in(path: Path) -> bool:
    """Whether `path` is a file that `path_of` gave."""
    from ds4mlx.tiny.noise.build import cache_path
    return path in (trained(), cache_path())
