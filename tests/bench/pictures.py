"""python tests/bench/pictures.py: what README shows of the terminal, drawn anew as pictures/*.svg.

The commands run on a pseudo-terminal over the scripted engine: the words are this file's, everything else is real. A
small terminal of our own reads what they send, and Rich draws its last screen.
"""
import os
import re
import sys
import threading
from pathlib import Path

import pexpect
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "pictures"
_SEQUENCE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|\x1b[()].|\x1b[=>]|[\r\n\b]|[^\x00-\x1f\x7f]")


class Screen:
    """A terminal that knows what our commands send: movements, erasing, colours, lines that scroll away."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows
        self.cells = [[(" ", "")] * columns for _ in range(rows)]
        self.x = self.y = 0
        self.style = ""         # the sequences of the present style, as they came

    def feed(self, text):
        for found in _SEQUENCE.finditer(text):
            if found[2]:
                self._obey(found[2], [int(n) for n in found[1].split(";") if n.isdigit()], found[0])
            elif found[0] == "\r":
                self.x = 0
            elif found[0] == "\n":
                self._next_line()
            elif found[0] == "\b":
                self.x = max(0, self.x - 1)
            elif not found[0].startswith("\x1b"):
                self._put(found[0])

    def _put(self, character):
        if self.x == self.columns:
            self.x = 0
            self._next_line()
        self.cells[self.y][self.x] = (character, self.style)
        self.x += 1

    def _next_line(self):
        if self.y == self.rows - 1:
            self.cells = [*self.cells[1:], [(" ", "")] * self.columns]
        else:
            self.y += 1

    def _obey(self, command, numbers, sequence):
        n = numbers[0] if numbers else 0
        match command:
            case "A" | "B":
                self.y = min(self.rows - 1, max(0, self.y + (max(1, n) if command == "B" else -max(1, n))))
            case "C" | "D":
                self.x = min(self.columns - 1, max(0, self.x + (max(1, n) if command == "C" else -max(1, n))))
            case "H":
                self.y, self.x = (numbers + [1, 1])[0] - 1, (numbers + [1, 1])[1] - 1
            case "m":
                self.style = "" if n == 0 else self.style + sequence
            case "K":
                self._erase(self.y, 0 if n == 2 else self.x)
            case "J":
                self._erase(self.y, 0 if n == 2 else self.x)
                for y in range(0 if n == 2 else self.y + 1, self.rows):
                    self._erase(y, 0)

    def _erase(self, y, x):
        self.cells[y][x:] = [(" ", "")] * (self.columns - x)

    def lines(self):
        """Each line as text with its colours; empty ones at the end are left out."""
        lines = [self._line(row) for row in self.cells]
        while lines and not lines[-1].plain.strip():
            lines.pop()
        return lines

    def _line(self, row):
        return Text.from_ansi("".join(f"\x1b[0m{style}{character}" for character, style in row).rstrip())


def draw(screen, name, title):
    console = Console(record=True, width=screen.columns, file=open(os.devnull, "w"), highlight=False)
    for line in screen.lines():
        line.rstrip()
        console.print(line)
    console.file.close()
    FOLDER.mkdir(exist_ok=True)
    drawn = console.export_svg(title=title, unique_id=name)     # a digest would make every picture another file
    (FOLDER / f"{name}.svg").write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL), "utf-8")


# ---- what is shown

THOUGHT = "They ask what a river says. Rivers do not speak; say so kindly, and name what one hears."
ANSWER = """It says very little, and says it all day: water over stone, a lower note where it is deep.

If you sit long enough you hear it name the things upstream: the rain of last night, the mill,
a tree that fell in March."""
LATER = "The same river, one street further.", "The same words, but there is nobody else talking, so you hear the ends."
SAYING = """
import sys
from ds4mlx.engine import stub
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

def open_scripted(path):
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)

    def answer(prompt):
        later = "night" in tokenizer.decode(prompt)
        return tokenizer.encode_marked("</think>".join(sys.argv[3:] if later else sys.argv[1:3]))
    return stub.StubEngine(answer, vocab=tokenizer.vocab_size, eos=tokenizer.eos, step_s=0.005)

stub.open_stub = open_scripted
from ds4mlx.cli.main import main
sys.exit(main(["chat", "-m", "tiny", "--engine", "stub"]))
"""


def environment(home):
    clean = {name: value for name, value in os.environ.items() if not name.startswith("DS4MLX_") and name != "NO_COLOR"}
    return clean | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", "DS4MLX_HOME": str(home)}


def chat(home):
    columns, rows = 100, 24
    screen = Screen(columns, rows)
    child = pexpect.spawn(sys.executable, ["-c", SAYING, THOUGHT, ANSWER, *LATER], timeout=30, encoding="utf-8",
                          dimensions=(rows, columns), echo=False, env=environment(home))

    def until(pattern):
        child.expect(pattern)
        screen.feed(child.before + child.after)

    until("ds4mlx>.*?h$|ds4mlx>")
    for line, last in (("What does the river say?", "first token"), ("And at night?", "first token"),
                       ("/undo", "forgotten"), ("/hlep", "did you mean")):
        child.send(line + "\r")
        until(f"{last}[^\n]*\n")
        until("ds4mlx>")
    child.close(force=True)
    return screen


def top(home):
    from running_server import start, stop

    from ds4mlx.text.segments import CONTROL_LITERALS
    from ds4mlx.text.tokenizer import BYTE_OF, Tokenizer
    tokenizer = Tokenizer(dict(enumerate([*CONTROL_LITERALS, *BYTE_OF])), [], "bytes")
    ids = tokenizer.encode_marked(ANSWER * 20)
    server = start(tokenizer, lambda prompt: ids, step_s=0.02, settings={"batched_session": 4, "ctx": 16384})
    columns, rows = 84, 24
    screen = Screen(columns, rows)
    for text in ("a" * 2000, "a" * 2000 + "b" * 900):
        server.chat(text, max_tokens=20)
    asking = [threading.Thread(target=server.chat, args=("c" * 700 * n,), kwargs={"max_tokens": 400}) for n in (1, 4)]
    for thread in asking:
        thread.start()
    child = pexpect.spawn(sys.executable, ["-m", "ds4mlx", "top", server.url, "--interval", "0.5"], timeout=30,
                          dimensions=(rows, columns), encoding="utf-8", env=environment(home))
    for _ in range(5):
        child.expect_exact("Ctrl+C leaves")
        screen.feed(child.before + child.after)
    child.close(force=True)
    for thread in asking:
        thread.join()
    stop(server)
    return screen


if __name__ == "__main__":
    import tempfile
    sys.path[:0] = [str(ROOT / "tests")]
    import eval_picture
    with tempfile.TemporaryDirectory() as folder:
        draw(chat(Path(folder)), "chat", "ds4mlx")
        draw(top(Path(folder)), "top", "ds4mlx top")
        draw(eval_picture.picture(Path(folder)), "eval", "ds4mlx eval")
        eval_picture.bench(Path(folder), FOLDER / "bench.svg")
