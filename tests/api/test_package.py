"""What `import ds4mlx` costs and offers."""
import inspect
import subprocess
import sys

import ds4mlx as ds


def test_every_public_name_is_there():
    assert all(getattr(ds, name) is not None for name in ds.__all__)
    assert set(ds.__all__) == {"__version__", *ds._PUBLIC}


def test_importing_it_imports_nothing_heavy():
    code = "import sys, ds4mlx; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"mlx", "mlx.core", "numpy", "tokenizers", "starlette", "asyncio"}.intersection(loaded)


def test_sessions_here_and_on_a_server_are_used_alike():
    from ds4mlx.api.remote import RemoteSession
    from ds4mlx.api.session import Session
    names = {"chat", "complete", "tokens", "text", "rewind", "fork", "save", "load", "close", "__enter__", "__exit__"}
    for name in names - {"tokens", "text"}:
        here, there = (list(inspect.signature(getattr(kind, name)).parameters) for kind in (Session, RemoteSession))
        assert here == there, name
    assert all(isinstance(getattr(kind, name), property) for kind in (Session, RemoteSession)
               for name in ("tokens", "text"))
