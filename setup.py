"""The compiled part of the package; all else is in pyproject.toml."""
from setuptools import Extension, setup

# Products for the CPU: a library with a C interface, which ops/native.py opens. Optional: without a compiler the
# installation goes on, and NumPy does the work. No -march: native.cpp chooses among instruction sets when it runs.
OPS = "src/ds4mlx/ops"
setup(ext_modules=[Extension(
    "ds4mlx.ops._native", [f"{OPS}/native.cpp"], depends=[f"{OPS}/native_lanes.h", f"{OPS}/native_products.h"],
    language="c++", extra_compile_args=["-std=c++17", "-O3", "-g0", "-pthread"], extra_link_args=["-pthread"],
    optional=True)])
