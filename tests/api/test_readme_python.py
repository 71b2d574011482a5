"""The Python of README and docs/python.md, run as it stands on the built-in model."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def snippets(document, heading):
    section = (ROOT / document).read_text("utf-8").partition(heading)[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize("document, heading, many, made", [
    ("README.md", "## From Python", 1, {"river.kvm", "river.kvm.json"}),
    ("docs/python.md", "# From Python", 3, {"river.kvm", "river.kvm.json", "river.f32"})])
def test_the_snippets_run_one_after_the_other(document, heading, many, made, tmp_path, monkeypatch, capsys, tiny_path):
    pytest.importorskip("mlx_lm")
    (tmp_path / "ds4flash.gguf").symlink_to(tiny_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    known = {}
    for snippet in (found := snippets(document, heading)):
        exec(compile(snippet, document, "exec"), known)
    assert len(found) == many and capsys.readouterr().out.strip()
    assert {path.name for path in tmp_path.iterdir()} >= made
