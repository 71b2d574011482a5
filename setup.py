"""The compiled part of the package; all else is in pyproject.toml."""
from setuptools import Extension, setup

# Products for the CPU and the quantiser's searches: libraries with a C interface, which ops/native.py and
# quant/compiled.py open. Optional: without a compiler the installation goes on, and NumPy does the work. No -march: both
# choose among instruction sets when they run.
OPS, QUANT = "src/ds4mlx/ops", "src/ds4mlx/quant"
setup(ext_modules=[Extension(
    "ds4mlx.ops._native", [f"{OPS}/native.cpp"], depends=[
        f"{OPS}/native_{part}.h" for part in ("lanes", "products", "rows", "hyper", "sample")], language="c++",
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-pthread"], extra_link_args=["-pthread"],
    optional=True), Extension(
    "ds4mlx.quant._search", [f"{QUANT}/search.cpp"], depends=[f"{QUANT}/search_blocks.h"], language="c++",
    # A product and a sum in one instruction. Vectors never leave the file, so that how they are passed is no matter.
    extra_compile_args=["-std=c++17", "-O3", "-g0", "-ffp-contract=fast", "-Wno-psabi"], optional=True)])
