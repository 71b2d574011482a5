"""python docs/build.py FOLDER: the documentation as a site, from Markdown and from docstrings. `make docs` runs it.

Pages are the Markdown files named below and the notebooks, as they stand in the repository; the reference is rendered
by pdoc, whose templates and search serve both. Whatever pdoc warns of is an error, and so is a link that leads nowhere.
"""
import inspect
import json
import re
import shutil
import sys
import types
import warnings
from base64 import b64decode
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pdoc.doc
import pdoc.render

import ds4mlx

ROOT = Path(__file__).resolve().parents[1]
PAGES = {   # name in the site -> source, in the order of the menu
    "index": "docs/index.md", "readme": "README.md", "quick-start": "docs/quick-start.md",
    "claude-code": "docs/claude-code.md", "agents": "docs/agents.md", "command-line": "docs/command-line.md",
    "python": "docs/python.md", "many-conversations": "docs/many-conversations.md",
    "cache-format": "docs/cache-format.md", "own-file": "docs/own-file.md", "eval-data": "EVAL_DATA.md",
    "measured": "docs/measured.md", "kernels": "docs/kernels.md", "cuda": "docs/cuda.md",
    "contributing": "CONTRIBUTING.md", "adding-an-operation": "docs/adding-an-operation.md",
    "adding-a-model-family": "docs/adding-a-model-family.md", "why": "docs/why.md", "changelog": "CHANGELOG.md",
    **{"model-card": f"src/ds4mlx/tiny/{path.name}" for path in ROOT.glob("src/ds4mlx/tiny/MODEL_CARD.md")},
    **{f"notebook-{path.stem[:2]}": f"notebooks/{path.name}" for path in sorted(ROOT.glob("notebooks/*.ipynb"))},
}
REFERENCE = ("ds4mlx", "ds4mlx.api.model", "ds4mlx.api.session", "ds4mlx.api.answer", "ds4mlx.api.remote",
             "ds4mlx.api.rendering", "ds4mlx.api.steering", "ds4mlx.models.deepseek_v4.directions", "ds4mlx.config",
             "ds4mlx.errors", "ds4mlx.engine.open", "ds4mlx.engine.protocol", "ds4mlx.engine.taps",
             "ds4mlx.chat.messages", "ds4mlx.chat.events", "ds4mlx.text.tokenizer", "ds4mlx.notebook", "ds4mlx.ops")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)(?=[)#])")     # a relative one, without its anchor
ABROAD = ("http:", "https:", "mailto:", "data:")
JSON = "None | bool | int | float | str | list[Json] | dict[str, Json]"
annotation = inspect.formatannotation


class BrokenLink(Exception):
    """A page refers to what is not in the site."""


def written(source: str, out: Path) -> str:
    """A page's Markdown, its links leading into the site. Of a notebook the cells with what they print and draw."""
    text = (ROOT / source).read_text("utf-8")
    cells = json.loads(text)["cells"] if source.endswith(".ipynb") else [{"cell_type": "markdown", "source": text}]
    parts = []
    for number, cell in enumerate(cells):
        content = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(LINK.sub(lambda link: address(source, link[1], out), content))
            continue
        parts.append(f"```python\n{content}\n```")
        for shown in cell["outputs"]:
            if drawn := shown.get("data", {}).get("image/png"):
                picture = Path("pictures") / f"{Path(source).stem}-{number}.png"
                (out / picture).parent.mkdir(exist_ok=True)
                (out / picture).write_bytes(b64decode(drawn))
                parts.append(f"![what the cell draws]({picture})")
            elif said := "".join(shown.get("text") or shown.get("data", {}).get("text/plain", "")).rstrip():
                parts.append(f"```text\n{said}\n```")
    return "# " + "\n\n".join(parts).lstrip("# ")


def title(text: str) -> str:
    """The first line of a page, as plain text."""
    return text.lstrip("# ").partition("\n")[0].replace("`", "")


def address(source: str, link: str, out: Path) -> str:
    """Where a relative link of a source file leads in the site; a picture or notebook is copied there."""
    path = (ROOT / source).parent.joinpath(link).resolve()
    if not path.is_relative_to(ROOT):
        raise BrokenLink(f"{source} links to {link}, outside the repository")
    name = path.relative_to(ROOT).as_posix()
    if name in PAGES.values():
        return next(page for page, known in PAGES.items() if known == name) + ".html"
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("src.").removesuffix(".__init__")
    if module in REFERENCE:
        return module.replace(".", "/") + ".html"
    if path.suffix not in (".svg", ".png", ".webp", ".ipynb") or not path.is_file():
        raise BrokenLink(f"{source} links to {link}, which is neither a page of the site nor a picture or notebook")
    (out / path.parent.name).mkdir(exist_ok=True)
    shutil.copy(path, out / path.parent.name / path.name)
    return f"{path.parent.name}/{path.name}"


def readable(of: object, module: object = None) -> str:
    """An annotation as it is written, with the type of JSON, which holds itself, by its name."""
    text = re.sub(r"ForwardRef\('(\w+)'\)|'(Json)'", r"\1\2", annotation(of, module))
    while JSON in text:
        text = text.replace(JSON, "Json")
    return text


def exported() -> str:
    """The names of `import ds4mlx`, as a table."""
    rows = []
    for name, module in sorted(ds4mlx._PUBLIC.items()):
        summary = (getattr(ds4mlx, name).__doc__ or "").strip().split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        rows.append(f"| `{name}` | `{module}.{name}` | {summary} |")
    return "\n".join(["", "", "| name | from | |", "|---|---|---|", *rows])


def modules(texts: dict[str, str]) -> dict[str, pdoc.doc.Module]:
    """All that is rendered, by name: a page is a module that has nothing but a docstring."""
    found = {}
    for name, text in texts.items():
        page = types.ModuleType(name)
        page.__doc__ = text
        found[name] = pdoc.doc.Module(page)
    for name in REFERENCE:
        module = import_module(name)
        if module is ds4mlx:
            module = types.ModuleType("ds4mlx")     # its names are imported on use: a table says from where
            module.__doc__ = "# import ds4mlx\n\n" + (ds4mlx.__doc__ or "") + exported()
        found[name] = pdoc.doc.Module(module)
    return found


def render(out: Path) -> None:
    """Every file of the site."""
    inspect.formatannotation = pdoc.doc.formatannotation = readable     # the first writes signatures
    texts = {name: written(source, out) for name, source in PAGES.items()}
    titles = {name: title(text) for name, text in texts.items()}
    titles["index"], titles["readme"] = "Start", "README"
    pdoc.render.configure(template_directory=Path(__file__).parent / "templates", docformat="markdown",
                          show_source=False, footer_text=f"ds4mlx {ds4mlx.__version__}")
    pdoc.render.env.globals |= {"pages": titles, "reference": REFERENCE}
    every = modules(texts)
    for name, module in every.items():
        path = out / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(pdoc.render.html_module(module, every), "utf-8")
    (out / "search.js").write_text(pdoc.render.search_index(every), "utf-8")


class Links(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.targets: list[str] = []    # what a reader may follow
        self.loaded: list[str] = []     # what is fetched with the page
        self.feed(page.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := named.get(key))}
        if target := named.get("href"):
            (self.loaded if tag == "link" else self.targets).append(target)
        if source := named.get("src"):
            self.loaded.append(source)


def check(out: Path) -> None:
    """Raises BrokenLink for a page or an anchor that is not there, and for what would be loaded from elsewhere."""
    pages = {path: Links(path) for path in out.rglob("*.html")}
    for path, links in pages.items():
        for target in (*links.loaded, *links.targets):
            if target.startswith(("data:",) if target in links.loaded else ABROAD):
                continue
            file, _, anchor = unquote(target).partition("#")
            found = (path.parent / file).resolve() if file else path
            if not found.is_file() or anchor and anchor not in pages[found].anchors:
                raise BrokenLink(f"{path.relative_to(out)} links to {target}, which is not there")


def build(out: Path) -> None:
    """The site, in a folder of its own. Raises BrokenLink, and for each warning of pdoc's the warning itself."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*Import of Json failed")    # a type of itself, shown by its name below
        render(out)
    check(out)


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
    print(f"{sys.argv[1]}/index.html")
