"""Every command of README and the pages: run in a home of its own, or looked at as far as it can be."""
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from document import PAGES, ROOT, blocks
from quant import checkpoints
from shell import ELSEWHERE, as_run, bare, commands, elsewhere, in_order


pytestmark = pytest.mark.skipif(sys.platform == "win32" or not shutil.which("curl"), reason="needs a shell and curl")
BY_PAGE = {page: [commands(block) for block in blocks(page, "sh")] for page in PAGES if blocks(page, "sh")}
ALL = sorted({bare(command) for groups in BY_PAGE.values() for group in groups for command in group})
TO_RUN = in_order(BY_PAGE)
TOMORROW = time.time() + 86400
LIMIT_S = 120   # for what hangs: a page takes seconds


@pytest.fixture(scope="module")
def place(tmp_path_factory, tiny_path):
    """A folder that looks like a clone in which `make serve` was run, and has the files that commands name."""
    place = tmp_path_factory.mktemp("clone")
    for name in ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "src", "tests", ".ci", "download.sh"):
        (place / name).symlink_to(ROOT / name)
    (place / ".venv").mkdir()
    (place / ".venv/bin").symlink_to(Path(sys.executable).parent)
    for stamp in (".made", ".ready", ".ready-to-test"):
        (place / ".venv" / stamp).touch()
        os.utime(place / ".venv" / stamp, (TOMORROW, TOMORROW))     # whatever is edited while this runs
    for name in ("ds4flash.gguf", "FILE.gguf"):
        (place / name).symlink_to(tiny_path)
    for name in ("notes.md", "long.txt", "prompt.txt", "text.txt"):
        (place / name).write_text("The river runs down to the sea. " * 30)
    (place / "request.json").write_text('{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}')
    (place / "prompts.jsonl").write_text('"plain text, a line of it"\n')
    checkpoints.write(place / "DIR", checkpoints.as_published())
    return place


@pytest.fixture(scope="module")
def environment(place, tiny_server):
    # Without what a `make` around the tests sets: one inside it would talk of the folders that it enters.
    left = ("DS4MLX_", "XDG_", "MAKE", "MFLAGS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(left)}
    return kept | {"HOME": str(place / "home"), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                   "DS4MLX_PORT": str(tiny_server), "DS4MLX_NO_LOCK": "1", "VIRTUAL_ENV_DISABLE_PROMPT": "1",
                   "SERVED": str(ROOT / "tests/docs/served.py"), "PYTHONWARNINGS": "default", "LC_ALL": "C.UTF-8"}


@pytest.mark.parametrize("page", [page for page, lines in TO_RUN.items() if lines])
def test_what_can_be_run_runs(page, place, environment):
    (place / "home").mkdir(exist_ok=True)
    lines = [as_run(command, int(environment["DS4MLX_PORT"])) for command in TO_RUN[page]]
    script = "trap 'echo \"failed: $BASH_COMMAND\" >&2' ERR\n" + "\n".join(lines)
    done = subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script], cwd=place, env=environment, text=True,
                          stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-500:]


@pytest.mark.parametrize("command", [command for command in ALL if elsewhere(command)])
def test_what_cannot_be_run_is_at_least_what_it_says(command):
    entry = elsewhere(command)
    assert entry.why and entry.check(command), f"{command}: {entry.check.__name__} does not hold"


def test_nothing_is_excused_that_no_document_says():
    assert [entry.pattern for entry in ELSEWHERE if not any(elsewhere(command) is entry for command in ALL)] == []
