"""The model's part in a task with one tool, played by a script that sees nothing but the prompt's tokens.

Asked something with a shell among its tools, it reasons and calls it; shown the result, it tells its last line; without
tools it says a few words. Which tool, under which parameter, it reads where a model does: in the rendered tools block.
"""
import json
import re

SHELLS = ("bash", "shell", "exec_command", "shell_command")  # the names that clients were seen to use
REASONING = "The shell can tell me."
SIDE_ANSWER = "A short title"
CALLS = "｜DSML｜"
_TOOLS = re.compile(r"### Available Tool Schemas\n\n(.*?)\n\nYou MUST strictly", re.S)
_RESULT = re.compile(r"<tool_result>(.*?)</tool_result>", re.S)


class ScriptedModel:
    """A script for StubEngine over the real vocabulary. `tells` makes text of a prompt's text."""

    def __init__(self, tokenizer, tells=None):
        self._tokenizer, self._tells = tokenizer, tells or answer

    def __call__(self, prompt):
        return self._tokenizer.encode_marked(self._tells(self._tokenizer.decode(prompt)))


def working_off(steps):
    """A longer task: each step is the calls of one answer, as (tool, arguments); after the last, a final text."""
    def tells(prompt):
        done = prompt.partition("<｜Assistant｜>")[2].count(f"</{CALLS}tool_calls>")
        opening = f"{REASONING}</think>" if prompt.endswith("<think>") else ""
        if _TOOLS.search(prompt) is None:
            return opening + SIDE_ANSWER
        return opening + (block(steps[done]) if done < len(steps) else f"All {done} steps are done.")

    return tells


def answer(prompt):
    """What follows a prompt, both as text with control literals."""
    opening = f"{REASONING}</think>" if prompt.endswith("<think>") else ""
    results = _RESULT.findall(prompt.rsplit("<｜User｜>", 1)[1] if "<｜User｜>" in prompt else "")
    if results:
        return f"{opening}The tool printed {last_line(results[-1])!r}."
    tool = shell_of(prompt)
    if tool is None:
        return opening + SIDE_ANSWER
    return opening + "I look." + call(tool, command(word(prompt)))


def word(prompt):
    """What the next command is to print: another word each time the conversation goes on."""
    return f"heron-{len(_RESULT.findall(prompt))}"


def command(word):
    return f"printf '{word}\\n' > tool_output.txt && cat tool_output.txt"


def last_line(result):
    return (result.strip().splitlines() or [""])[-1]


def shell_of(prompt):
    """The schema of the shell among a prompt's tools, or None."""
    block = _TOOLS.search(prompt)
    tools = [json.loads(line) for line in block[1].splitlines()] if block else []
    return next((tool for tool in tools if tool["name"].lower() in SHELLS), None)


def call(tool, line):
    """A call of a shell: the command, and some words where others are required."""
    schema = tool["parameters"]
    parameters = schema["properties"]
    key = next(name for name in ("command", "cmd") if name in parameters)
    values = {key: line if parameters[key].get("type") != "array" else ["bash", "-c", line]}
    values |= {name: "Looks around" for name in schema.get("required", ()) if name != key}
    return block([(tool["name"], values)])


def block(calls):
    """Calls as the model writes them."""
    told = "".join(f'<{CALLS}invoke name="{name}">\n{_parameters(values)}</{CALLS}invoke>\n' for name, values in calls)
    return f"\n\n<{CALLS}tool_calls>\n{told}</{CALLS}tool_calls>"


def _parameters(values):
    return "".join(f'<{CALLS}parameter name="{name}" {_spelled(value)}</{CALLS}parameter>\n'
                   for name, value in values.items())


def _spelled(value):
    return f'string="true">{value}' if isinstance(value, str) else f'string="false">{json.dumps(value)}'
