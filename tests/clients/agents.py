"""Coding agents as test drivers: installed from npm once, run with a HOME of their own, set up as `ds4mlx wire` prints.

`python tests/clients/agents.py` installs all of them; nothing else here needs a network beyond loopback.
"""
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ds4mlx.cli.wire_check import find_server
from ds4mlx.cli.wire_setup import CLIENTS, KEY_VARIABLE
from ds4mlx.config import cache_dir

CACHE = cache_dir() / "clients"
LIMIT_S = 180     # for one run; each takes seconds
OLDEST_NODE = (22, 19)  # that runs Pi
SYSTEM = {"Linux": "linux", "Darwin": "darwin"}.get(platform.system(), "")
MACHINE = {"x86_64": "x64", "amd64": "x64", "aarch64": "arm64", "arm64": "arm64"}.get(platform.machine().lower(), "")
TRIPLE = {"linux-x64": "x86_64-unknown-linux-musl", "linux-arm64": "aarch64-unknown-linux-musl",
          "darwin-x64": "x86_64-apple-darwin", "darwin-arm64": "aarch64-apple-darwin"}.get(f"{SYSTEM}-{MACHINE}", "")


@dataclass(frozen=True)
class Agent:
    """program: below node_modules. command(prompt, again): its arguments, `again` to go on with the conversation."""
    name: str
    package: str
    version: str
    program: str
    command: Callable[[str, bool], list[str]]
    config: str = ""          # where in HOME the text of `ds4mlx wire` belongs
    environment: tuple[tuple[str, str], ...] = ()
    other_words: tuple[tuple[str, str], ...] = ()   # what to replace in the text of `ds4mlx wire`, and by what

    @property
    def path(self):
        return CACHE / self.name / "node_modules" / self.program


def _claude(prompt, again):
    return [*(["--continue"] if again else []), "-p", prompt, "--allowedTools", "Bash,Edit,Write"]


def _codex(prompt, again):
    return ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox",
            *(["resume", "--last"] if again else []), prompt]


def _opencode(prompt, again):
    return ["run", *(["--continue"] if again else []), prompt]


def _pi(prompt, again):
    return [*(["--continue"] if again else []), "-p", "--offline", "--provider", "ds4mlx",
            "--model", "deepseek-v4-flash", prompt]


def _on(*names):
    return tuple((name, "1") for name in names)


AGENTS = {agent.name: agent for agent in (
    Agent("claude", "@anthropic-ai/claude-code", "2.1.332", f"@anthropic-ai/claude-code-{SYSTEM}-{MACHINE}/claude",
          _claude, environment=_on("DISABLE_TELEMETRY", "DISABLE_ERROR_REPORTING", "DISABLE_AUTOUPDATER")),
    Agent("codex", "@openai/codex", "0.171.0", f"@openai/codex-{SYSTEM}-{MACHINE}/vendor/{TRIPLE}/bin/codex",
          _codex, ".codex/config.toml", ((KEY_VARIABLE, "local"),)),
    Agent("opencode", "opencode-ai", "1.18.33", f"opencode-{SYSTEM}-{MACHINE}/bin/opencode", _opencode,
          ".config/opencode/opencode.json",
          _on(*(f"OPENCODE_DISABLE_{what}" for what in ("AUTOUPDATE", "MODELS_FETCH", "SHARE", "LSP_DOWNLOAD",
                                                         "DEFAULT_PLUGINS")))),
    Agent("pi", "@earendil-works/pi-coding-agent", "1.6.0", "@earendil-works/pi-coding-agent/dist/bundle/cli.js", _pi,
          ".pi/agent/models.json", (("PI_OFFLINE", "1"), ("PI_TELEMETRY", "0"))),
)}

PI = AGENTS["pi"]
AGENTS |= {   # the two other APIs that Pi can speak
    "pi-responses": replace(PI, other_words=(("openai-completions", "openai-responses"),)),
    "pi-messages": replace(PI, other_words=(("openai-completions", "anthropic-messages"), ('/v1"', '"'))),
}


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str


def run(agent, url, prompt, home, project, again=False):
    """One run of an agent in the folder `project`, against the server at `url`."""
    setup = CLIENTS[agent.name].setup(find_server(url, None))
    for word, other in agent.other_words:
        assert word in setup
        setup = setup.replace(word, other)
    programs = home / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    started = _starter(agent, setup, home, programs)
    environment = {"PATH": f"{programs}:/usr/local/bin:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(home),
                   "LANG": "C.UTF-8", "TERM": "dumb", "SHELL": "/bin/sh", "NO_PROXY": "127.0.0.1,localhost",
                   **dict(agent.environment)}
    with subprocess.Popen([*started, *agent.command(prompt, again)], cwd=project, env=environment, text=True,
                          stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          start_new_session=True) as process:
        try:
            out, err = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return Ran(process.returncode, out, err)


def _starter(agent, setup, home, programs):
    """Puts the setup where it belongs; how the agent is started then."""
    if agent.config:
        config = home / agent.config
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text(setup, "utf-8")
        return [*([str(_node())] if agent.path.suffix == ".js" else []), str(agent.path)]
    program = programs / agent.name     # what the printed script calls
    if not program.is_symlink():
        program.symlink_to(agent.path)
    script = programs / f"{agent.name}-ds4mlx"
    script.write_text(setup, "utf-8")
    script.chmod(0o700)
    return [str(script)]


def _node():
    """A node that is new enough: the system's, else one from npm."""
    found = shutil.which("node")
    if found:
        told = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
        if tuple(map(int, re.findall(r"\d+", told)[:2])) >= OLDEST_NODE:
            return Path(found)
    return CACHE / "node" / "node_modules" / f"node-{SYSTEM}-{MACHINE}" / "bin" / "node"


# ---- installing

def install(folder, package, version):
    """A package of npm into a folder of its own. No script of it is run: the programs lie in it as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps({"name": "client-under-test", "private": True}))
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error",
                    f"{package}@{version}"], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=900)


def main():
    if shutil.which("npm") is None:
        return "npm was not found; the clients come from there, install node with npm"
    for agent in {agent.name: agent for agent in AGENTS.values()}.values():   # Pi is there three times
        manifest = CACHE / agent.name / "node_modules" / agent.package / "package.json"
        if not agent.path.exists() or json.loads(manifest.read_text())["version"] != agent.version:
            install(CACHE / agent.name, agent.package, agent.version)
        print(f"{agent.name:10} {agent.version:10} {agent.path}")
    if not _node().exists():
        install(CACHE / "node", f"node-{SYSTEM}-{MACHINE}", "22")
    return 0


if __name__ == "__main__":
    sys.exit(main())
