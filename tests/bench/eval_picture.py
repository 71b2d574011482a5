"""What README shows of `ds4mlx eval`: the cases of the package on a pseudo-terminal, answered by a script."""
import json
import sys

import pexpect
from pictures import Screen, environment

from ds4mlx.evaluation.cases import own_cases

COLUMNS, ROWS, CASES = 104, 24, 20
THOUGHT = "Let me look at what is asked, work it out once, and then once more from the other end to be sure. "
WRONG = {"arithmetic-product", "code-slices"}
ANSWERING = """
import json, sys
from ds4mlx.engine import stub
from ds4mlx.gguf.reader import GGUF
from ds4mlx.text.tokenizer import Tokenizer

answers = json.load(open(sys.argv[1]))

def open_scripted(path):
    with GGUF.open(path) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)

    def answer(prompt):
        text = tokenizer.decode(prompt)
        return tokenizer.encode_marked(next(said for question, said in answers if question in text))
    return stub.StubEngine(answer, vocab=tokenizer.vocab_size, eos=tokenizer.eos, step_s=0.005)

stub.open_stub = open_scripted
from ds4mlx.cli.main import main
sys.exit(main(["eval", "-m", "tiny", "--engine", "stub", *sys.argv[2:]]))
"""


def said(case):
    """A right answer to a case, or a wrong one to those of WRONG."""
    match case.kind:
        case "call":
            calls = "".join(f'<｜DSML｜invoke name="{call["name"]}">\n' + "".join(
                f'<｜DSML｜parameter name="{name}" string="{str(isinstance(value, str)).lower()}">'
                f'{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n'
                for name, value in call["arguments"].items()) + "</｜DSML｜invoke>\n"
                for call in json.loads(case.answer))
            answer = f"<｜DSML｜tool_calls>\n{calls}</｜DSML｜tool_calls>" if calls else "Paris."
        case "text":
            answer = next((str(check["equals"]) for check in case.checks if "equals" in check), "Rain fell on the roof")
        case _:
            answer = f"So it must be.\n\nAnswer: {'7' if case.id in WRONG else case.answer}"
    return f"{THOUGHT * 3}</think>{answer}"


def picture(home):
    screen = Screen(COLUMNS, ROWS)
    answers = home / "answers.json"
    answers.write_text(json.dumps([(case.question, said(case)) for case in own_cases()]))
    child = pexpect.spawn(sys.executable, ["-c", ANSWERING, str(answers), "--pause-ms", "0", "--questions", str(CASES)],
                          timeout=60, encoding="utf-8", dimensions=(ROWS, COLUMNS), env=environment(home))
    for pattern in (f"{CASES - 3} of {CASES}", *["passed, "] * 4):     # the first line of the next screens
        child.expect(pattern)
        screen.feed(child.before + child.after)
    child.close(force=True)
    return screen


def bench(home, path):
    """`ds4mlx bench` of the built-in model on this machine, drawn by itself."""
    text = home / "text.txt"
    text.write_text("The river begins as a thin stream between two hills, and carries stones down the valley. " * 700)
    command = ["-m", "ds4mlx", "bench", "-m", "tiny", "--prompt-file", str(text), "--ctx-start", "512", "--ctx-max",
               "8192", "--step-mul", "2", "--gen-tokens", "64", "--plot", str(path)]
    pexpect.run(" ".join([sys.executable, *command]), timeout=300, env=environment(home))
