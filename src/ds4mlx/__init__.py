"""DeepSeek V4 Flash on one's own machine. The names below are imported when they are first used."""
from importlib import import_module

__version__ = "0.1.0"

_PUBLIC = {
    "Settings": "ds4mlx.config", "Engine": "ds4mlx.engine.protocol", "Session": "ds4mlx.engine.protocol",
    "Row": "ds4mlx.engine.protocol", "Sampling": "ds4mlx.engine.protocol", "open_engine": "ds4mlx.engine.open",
    "Tokenizer": "ds4mlx.text.tokenizer", "for_mlx_lm": "ds4mlx.notebook",
}
__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
