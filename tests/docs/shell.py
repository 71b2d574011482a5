"""The commands of the documents: what is run as it stands, what is run shorter, and what cannot be run here and why."""
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import metadata

from document import ROOT

# What runs until it is stopped: it is started, asked one question, and stopped.
SERVERS = re.compile(r"make serve|ds4mlx serve")
REPEATED = re.compile(r"(ds4mlx|make|curl|cat) ?[^>]*$")     # changes nothing that a later command needs
# What would take minutes is run with these at its end.
SHORTER = {
    r"ds4mlx eval": "--questions 1 -n 8 --soft-limit-reply-budget 4 --hard-limit-reply-budget 2 --plain",
    r"ds4mlx bench --prompt-file": "--ctx-start 64 --ctx-max 128 --step-incr 64 --gen-tokens 4 --warmup 0",
    r"ds4mlx run": "-n 4",
    r"cat \S+ \| ds4mlx run": "-n 4",
    r"ds4mlx top": "--once --interval 0.1",
    r"ds4mlx logprobs": "-n 2",
    r"curl": "-m 30",
}


def is_accepted(command: str) -> bool:
    """Whether the options and arguments of a `ds4mlx` command are known."""
    from ds4mlx.cli.main import build_parser
    words = [word for word in shlex.split(command) if "=" not in word]
    return not build_parser().parse_known_args(words[1:])[1]


def is_there(command: str) -> bool:
    """Whether all files of the repository that the command names exist, and a script tells that it is called so."""
    paths = [ROOT / word for word in shlex.split(command) if word.startswith("tests/")]
    scripts = [path for path in paths if path.suffix == ".py"]
    return bool(paths) and all(path.exists() for path in paths) and all(
        path.relative_to(ROOT).as_posix() in path.read_text("utf-8") or "__main__" in path.read_text("utf-8")
        for path in scripts)


def are_tests(command: str) -> bool:
    """Whether the folder or file and the marker that pytest is given exist."""
    words = shlex.split(command)
    marked = [words[i + 2] for i, word in enumerate(words[1:]) if word == "-m" and i]     # not that of python -m
    return all((ROOT / word).exists() for word in words if word.startswith("tests/")) and all(
        f'    "{name}: ' in (ROOT / "pyproject.toml").read_text() for name in marked)


def is_a_target(command: str) -> bool:
    return f"\n{shlex.split(command)[1]}:" in (ROOT / "Makefile").read_text("utf-8")


def is_an_extra(command: str) -> bool:
    return f"\n{re.search(r'ds4mlx.(.*).$', shlex.split(command)[-1])[1]} = [" in (ROOT / "pyproject.toml").read_text()


def is_of_our_mlx(command: str) -> bool:
    """Whether the extra or the package is one of MLX's, and the version the one that this project needs."""
    needed = metadata("mlx")
    known = {*needed.get_all("Provides-Extra"), *re.findall(r"mlx-\w+", " ".join(needed.get_all("Requires-Dist")))}
    part, version = re.fullmatch(r"(?:mlx\[)?([\w-]+)\]?(.*)", shlex.split(command)[-1]).groups()
    return part in known and f'"mlx[cpu]{version}' in (ROOT / "pyproject.toml").read_text()


def is_a_target_of_download(command: str) -> bool:
    return f"\n{shlex.split(command)[1]} main " in (ROOT / "download.sh").read_text()


def is_a_client(command: str) -> bool:
    return shlex.split(command)[0].removesuffix("-ds4mlx") in ("claude", "pi")


@dataclass(frozen=True)
class Elsewhere:
    """A command that cannot be run here: why, and what can be checked of it all the same."""
    pattern: str
    why: str
    check: Callable[[str], bool]


ELSEWHERE = [
    Elsewhere(r"\./download\.sh q2", "86.7 GB; tests/test_download.py downloads from a server of its own",
              is_a_target_of_download),
    Elsewhere(r"make (test|soak|notebooks|docs|test-clients)", "minutes; how these tests are run, or a job of its own",
              is_a_target),
    Elsewhere(r"pip install .*ds4mlx\[", "packages for a card", is_an_extra),
    Elsewhere(r"pip (uninstall -y mlx-cpu|install .mlx\[cuda)", "MLX's build for a card", is_of_our_mlx),
    Elsewhere(r"ds4mlx ((run|bench --op (all|sample)) --engine cuda|serve --engine mlx|bench -m FLASH)",
              "needs a CUDA card", is_accepted),
    Elsewhere(r"ds4mlx doctor --kernels", "needs a Mac; emulated it takes a minute, tests/engine does a part",
              is_accepted),
    Elsewhere(r"ds4mlx bench --plan", "40 s; tests/engine/test_mlx_plan.py counts a small model", is_accepted),
    Elsewhere(r"DS4MLX_OPS=metal-emulated", "minutes; tests/models/test_emulated.py runs a smaller one", is_accepted),
    Elsewhere(r"ds4mlx compare --vectors", "needs vectors of the published weights; tests/cli/test_compare_command.py",
              is_accepted),
    Elsewhere(r"(\S+/)?python tests/", "a measurement: minutes, or a card, or a file of 3.4 GB", is_there),
    Elsewhere(r"(\S+/)?python -m pytest", "tests of their own", are_tests),
    Elsewhere(r"(claude-ds4mlx|pi) ?", "a client from npm; make test-clients runs it", is_a_client),
]


def commands(block: str) -> list[str]:
    """Each command of a block: a line, or several that quotes or a backslash hold together."""
    found, held = [], ""
    for line in block.splitlines():
        held += line
        try:
            if held.strip() and not held.endswith("\\"):
                shlex.split(held, comments=True)
                found.append(held)
            elif held.strip():
                held += "\n"
                continue
        except ValueError:      # a quote is open
            held += "\n"
            continue
        held = ""
    assert not held, f"a quote is open: {held}"
    return found


def bare(command: str) -> str:
    """The command without its comment."""
    return re.sub(r"\s+# .*$", "", command) if "\n" not in command else command


def in_order(pages: dict[str, list[list[str]]]) -> dict[str, list[str]]:
    """The commands to run of each page; those that an earlier page has had already need not run again."""
    seen, chosen = set(), {}
    for page, groups in pages.items():
        here = [bare(command) for group in groups for command in group]
        chosen[page] = [command for command in here if not elsewhere(command) and not (
            command in seen and REPEATED.match(command))]
        seen |= set(here)
    return chosen


def elsewhere(command: str) -> Elsewhere | None:
    return next((entry for entry in ELSEWHERE if re.match(entry.pattern, command)), None)


def as_run(command: str, port: int) -> str:
    """The command as a test runs it, beside a server at this port."""
    command = bare(command).replace("127.0.0.1:8000", f"127.0.0.1:{port}")
    if SERVERS.search(command):
        anywhere = "PORT=0" if command.startswith("make") else "--port 0"
        return f'python "$SERVED" {command} {anywhere}'
    more = next((more for pattern, more in SHORTER.items() if re.match(pattern, command)), "")
    return f"{command} {more}"
