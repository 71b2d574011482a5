"""The Python of the documents, run as it stands on the built-in model."""
import pytest
from document import PAGES, blocks, text

MADE = {"README.md": {"river.kvm", "river.kvm.json"}, "docs/python.md": {"river.kvm", "river.kvm.json", "river.f32"},
        "docs/quick-start.md": set()}
# Of the rest one asks a server, which is below, and the others are an operation, in test_documents.py.
CLIENT = "from openai import OpenAI\n"


@pytest.fixture
def place(tmp_path, monkeypatch, tiny_path):
    """A folder in which the model is found, and nothing of the user's is."""
    (tmp_path / "ds4flash.gguf").symlink_to(tiny_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize("page", MADE)
def test_the_snippets_run_one_after_the_other(page, place, capsys):
    pytest.importorskip("mlx_lm")
    known = {}
    for snippet in blocks(page, "python"):
        if not snippet.startswith(CLIENT):
            exec(compile(snippet, page, "exec"), known)
    assert capsys.readouterr().out.strip()
    assert {path.name for path in place.iterdir()} >= MADE[page]


def test_the_official_client_gets_a_call_and_tells_its_result(capsys, tiny_server):
    (snippet,) = (found for found in blocks("README.md", "python") if found.startswith(CLIENT))
    known = {}
    exec(compile(snippet.replace("127.0.0.1:8000", f"127.0.0.1:{tiny_server}"), "README.md", "exec"), known)
    known["client"].close()     # a reader's ends with the process
    assert capsys.readouterr().out == "The temperature is 21 and the sky is sunny.\n"


def test_no_snippet_is_left_out():
    others = {page for page in PAGES if "```python" in text(page)} - {"docs/adding-an-operation.md"}
    assert others == set(MADE)
