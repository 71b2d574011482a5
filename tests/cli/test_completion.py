"""`ds4mlx completion`: what the shells themselves offer at the end of a command line."""
import shutil
import subprocess

import pytest

from ds4mlx.config import COMMANDS

BASH = """source ./script; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _ds4mlx
printf '%s\\n' "${{COMPREPLY[@]}}" """
ZSH = """compdef() {{ :; }}; source ./script
_describe() {{ for each in ${{(P)2}}; do each=${{each%%:*}}; [[ $each = "$PREFIX"* ]] && print -r -- $each; done; }}
_files() {{ print -rl -- $PREFIX*(N); }}
words=({words}) CURRENT=${{#words}} PREFIX=${{words[-1]}}; _ds4mlx"""
FISH = 'source ./script; complete -C "{words}" | string split -f 1 \\t'
ASK = {"bash": (["bash", "-c"], BASH), "zsh": (["zsh", "-f", "-c"], ZSH), "fish": (["fish", "--no-config", "-c"], FISH)}


@pytest.fixture(params=[pytest.param(shell, marks=pytest.mark.skipif(not shutil.which(shell), reason=f"needs {shell}"))
                        for shell in ASK])
def offered(request, ds4mlx, tmp_path, monkeypatch):
    """offered(words): what may stand in the place of the last word; "" is nothing begun yet."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script").write_text(ds4mlx("completion", request.param).out)
    command, ask = ASK[request.param]

    def run(*words):
        quoted = " ".join(words) if request.param == "fish" else " ".join(f"'{word}'" for word in words)
        result = subprocess.run([*command, ask.format(words=quoted)], capture_output=True, text=True, timeout=60,
                                cwd=tmp_path)
        assert result.stderr == ""
        return set(result.stdout.split())
    return run


def test_commands_are_offered_first(offered):
    assert set(COMMANDS) <= offered("ds4mlx", "") and offered("ds4mlx", "inspe") == {"inspect"}


def test_options_of_the_command_are_offered(offered):
    assert offered("ds4mlx", "run", "--prom") == {"--prompt", "--prompt-file", "--prompt-layout"}
    assert offered("ds4mlx", "serve", "--mess") == set()


def test_values_of_an_option_are_offered(offered):
    assert offered("ds4mlx", "run", "--format", "") == {"text", "json"}
    assert offered("ds4mlx", "run", "--format", "j") == {"json"}


def test_files_are_offered_where_a_file_belongs(offered, tmp_path):
    (tmp_path / "model.gguf").touch()
    assert offered("ds4mlx", "run", "-m", "mod") == {"model.gguf"}
    assert offered("ds4mlx", "inspect", "mod") == {"model.gguf"}


def test_actions_of_a_command_are_offered_and_then_their_options(offered):
    assert {"ls", "verify", "prune"} <= offered("ds4mlx", "cache", "")
    assert offered("ds4mlx", "cache", "clear", "--y") == {"--yes"}


def test_names_of_clients_are_offered(offered):
    assert {"claude", "codex"} <= offered("ds4mlx", "wire", "c")


@pytest.mark.parametrize("arguments", [[], ["tcsh"]])
def test_a_shell_that_is_not_known_is_misuse(ds4mlx, arguments):
    result = ds4mlx("completion", *arguments)
    assert result.code == 2 and result.out == "" and "bash|zsh|fish" in result.err.splitlines()[0]
