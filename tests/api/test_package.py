"""What `import ds4mlx` costs and offers."""
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
