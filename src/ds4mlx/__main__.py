"""python -m ds4mlx"""
from ds4mlx.cli.main import console

console()
