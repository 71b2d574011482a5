"""The Markdown files of the project, and what stands in their fenced blocks."""
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", "EVAL_DATA.md", *sorted(f"docs/{path.name}" for path in
                                                                (ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def text(page):
    return (ROOT / page).read_text("utf-8")


def blocks(page, language):
    """The contents of the page's blocks of one language, in order."""
    return [block for kind, block in FENCED.findall(text(page)) if kind == language]
