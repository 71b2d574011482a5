"""DeepSeek V4 Flash on one's own machine. The names below are imported when they are first used.

    import ds4mlx as ds
    session = ds.load("tiny").session()
    for piece in session.chat("What does the river say?"):
        print(piece, end="")
"""
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ds4mlx.api.answer import Answer
    from ds4mlx.api.model import Model, load
    from ds4mlx.api.remote import connect
    from ds4mlx.api.session import Session
    from ds4mlx.api.steering import directions
    from ds4mlx.config import Settings
    from ds4mlx.engine.open import open_engine
    from ds4mlx.engine.protocol import Engine, Row, Sampling
    from ds4mlx.engine.taps import Taps
    from ds4mlx.models.deepseek_v4.directions import Steering
    from ds4mlx.notebook import for_mlx_lm
    from ds4mlx.text.tokenizer import Tokenizer

__version__ = "0.1.0"

_PUBLIC = {
    "load": "ds4mlx.api.model", "Model": "ds4mlx.api.model", "Session": "ds4mlx.api.session",
    "Answer": "ds4mlx.api.answer", "Taps": "ds4mlx.engine.taps", "connect": "ds4mlx.api.remote",
    "directions": "ds4mlx.api.steering", "Steering": "ds4mlx.models.deepseek_v4.directions",
    "Settings": "ds4mlx.config", "Sampling": "ds4mlx.engine.protocol", "Tokenizer": "ds4mlx.text.tokenizer",
    "open_engine": "ds4mlx.engine.open", "Engine": "ds4mlx.engine.protocol", "Row": "ds4mlx.engine.protocol",
    "for_mlx_lm": "ds4mlx.notebook",
}
__all__ = ["Answer", "Engine", "Model", "Row", "Sampling", "Session", "Settings", "Steering", "Taps", "Tokenizer",
           "__version__", "connect", "directions", "for_mlx_lm", "load", "open_engine"]


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
