"""The README's Python, run as it stands on the built-in model."""
import re
from pathlib import Path

import pytest

SNIPPETS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "README.md").read_text("utf-8")
                      .partition("## From Python")[2].partition("\n## ")[0], re.DOTALL)


def test_the_snippets_run_one_after_the_other(tmp_path, monkeypatch, capsys, tiny_path):
    pytest.importorskip("mlx_lm")
    (tmp_path / "ds4flash.gguf").symlink_to(tiny_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), known)
    assert len(SNIPPETS) == 3 and capsys.readouterr().out.strip()
    assert {path.name for path in tmp_path.iterdir()} >= {"river.kvm", "river.kvm.json", "river.f32"}
