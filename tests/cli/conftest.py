"""Commands as a user runs them: arguments in, exit code, standard output and standard error out."""
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from ds4mlx.cli.main import main


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def clean_place(tmp_path, monkeypatch):
    """A directory of its own, and nothing of the user's: no variables, no state, no cache."""
    for name in [name for name in os.environ if name.startswith("DS4MLX_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("DS4MLX_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ds4mlx(capsys):
    """ds4mlx(*arguments): one command in this process."""
    def run(*arguments):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as exit:
            code = exit.code
        return Result(code, *capsys.readouterr())
    return run


@pytest.fixture
def start():
    """start(*arguments, stdin=): the same in a process of its own, which is gone after the test."""
    started = []

    def popen(*arguments, **kwargs):
        command = [sys.executable, "-W", "error", "-m", "ds4mlx", *map(str, arguments)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, **streams | kwargs)
        started.append(process)
        return process
    yield popen
    for process in started:
        process.kill()
        process.communicate()
