"""python -m ds4mlx"""
from ds4mlx.cli.main import console

if __name__ == "__main__":  # a child process imports this file under another name
    console()
