"""One place that turns a name into an engine. Engines are imported when asked for, so the rest runs without MLX."""
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import Engine
from ds4mlx.errors import UsageError


def open_engine(settings: Settings) -> Engine:
    """The engine that `settings` names, over the model file `settings.model`.

    Call it on the thread that will use the engine. Raises ModelFileError, DoesNotFit, and UsageError for an engine
    whose packages are not installed.
    """
    assert settings.model is not None, "resolve the model before opening an engine"
    if settings.dir_steering_file is not None and settings.engine != "mlx":
        raise UsageError(f"--engine {settings.engine} cannot be steered; leave out --dir-steering-file, or use mlx")
    if settings.engine == "stub":
        from ds4mlx.engine.stub import open_stub
        return open_stub(settings.model)
    if settings.engine == "cuda":
        from ds4mlx.cuda_port.engine import open_cuda
        return open_cuda(settings, settings.model)
    from ds4mlx.engine.mlx_engine import open_mlx
    return open_mlx(settings, settings.model)
