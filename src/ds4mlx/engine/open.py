"""One place that turns a name into an engine. Engines are imported when asked for, so the rest runs without MLX."""
from typing import cast

from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Engine, Progress
from ds4mlx.errors import UsageError


def open_engine(settings: Settings, progress: Progress | None = None) -> Engine:
    """The engine that `settings` names, over the model file `settings.model`. progress: called by an engine that copies
    weights, as they come.

    Call it on the thread that will use the engine. Raises ModelFileError, DoesNotFit, and UsageError for an engine
    whose packages are not installed.
    """
    assert settings.model is not None, "resolve the model before opening an engine"
    if settings.dir_steering_file is not None and settings.engine != "mlx":
        raise UsageError(f"--engine {settings.engine} cannot be steered; leave out --dir-steering-file, or use mlx")
    if settings.engine == "stub":
        from ds4mlx.engine.stub import open_stub
        return cast(Engine, open_stub(settings.model))  # it takes its own sessions only, as every engine does
    if settings.engine == "cuda":
        from ds4mlx.cuda_port.engine import open_cuda
        return cast(Engine, open_cuda(settings, settings.model, progress))
    from ds4mlx.engine.mlx_engine import open_mlx
    return cast(Engine, open_mlx(settings, settings.model))
