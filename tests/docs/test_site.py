"""The documentation as `make docs` renders it."""
import inspect
import sys

import pytest
from document import ROOT


@pytest.fixture
def rendered(site_builder, tmp_path, monkeypatch):
    """The builder, and a folder to render into; whatever it sets in pdoc and inspect goes back."""
    monkeypatch.setattr(inspect, "formatannotation", inspect.formatannotation)
    monkeypatch.setattr(site_builder.pdoc.doc, "formatannotation", site_builder.pdoc.doc.formatannotation)
    return site_builder, tmp_path / "site"


def test_it_renders_without_a_warning_or_a_broken_link(rendered):
    builder, out = rendered
    builder.build(out)
    pages = {path.relative_to(out).as_posix() for path in out.rglob("*.html")}
    assert pages == {f"{name.replace('.', '/')}.html" for name in (*builder.PAGES, *builder.REFERENCE)}


def test_every_page_of_the_project_is_in_it(rendered):
    builder, _ = rendered
    patterns = ("*.md", "docs/*.md", "notebooks/*.ipynb", "src/**/*.md")
    written = [path for pattern in patterns for path in ROOT.glob(pattern)]
    assert {path.relative_to(ROOT).as_posix() for path in written} == set(builder.PAGES.values())


@pytest.mark.parametrize("text", ["[a](gone.md)", "[a](other.md#gone)", "[a](#gone)", "[a](../outside.md)",
                                  "![a](https://example.org/a.png)", "![a](gone.svg)"])
def test_what_leads_nowhere_or_would_load_from_elsewhere_is_an_error(rendered, text, monkeypatch, tmp_path):
    builder, out = rendered
    for name, content in {"page.md": f"# Page\n\n{text}\n", "other.md": "# Other\n\n[a](page.md#page)\n"}.items():
        (tmp_path / name).write_text(content, "utf-8")
    monkeypatch.setattr(builder, "ROOT", tmp_path)
    monkeypatch.setattr(builder, "PAGES", {"index": "page.md", "readme": "other.md"})
    monkeypatch.setattr(builder, "REFERENCE", ("ds4mlx",))
    with pytest.raises(builder.BrokenLink):
        builder.build(out)


def test_a_warning_of_pdoc_s_is_an_error(rendered, monkeypatch):
    builder, out = rendered
    module = type(sys)("odd")
    module.__doc__, module.__all__ = "Odd.", ["missing"]
    monkeypatch.setitem(sys.modules, "odd", module)
    monkeypatch.setattr(builder, "REFERENCE", ("ds4mlx", "odd"))
    with pytest.raises(UserWarning, match="missing"):
        builder.build(out)
