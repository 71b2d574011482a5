"""How long `import ds4mlx` takes, and its first use, beyond starting Python: best of several fresh processes.

    python tests/bench/import_time.py [ROUNDS]
"""
import subprocess
import sys
import time

NAMES = ("Settings", "connect", "load")
STATEMENTS = {"Python alone": "pass", "import ds4mlx": "import ds4mlx",
              **{f"ds4mlx.{name}": f"import ds4mlx; ds4mlx.{name}" for name in NAMES}}


def seconds(statement: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", statement], check=True)
    return time.perf_counter() - start


def main(rounds: int) -> None:
    best = {name: min(seconds(statement) for _ in range(rounds)) for name, statement in STATEMENTS.items()}
    start = best.pop("Python alone")
    print(f"{'Python alone':16} {1000 * start:6.0f} ms")
    for name, took in best.items():
        print(f"{name:16} {1000 * (took - start):6.0f} ms more")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
