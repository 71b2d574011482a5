"""Coding agents do a task with a tool on the server, set up as `ds4mlx wire` prints, and go on with it later."""
import time

import agents
import pytest
from scripted_model import working_off

TASK = "Run a command that prints a word, then tell me the word."
AGAIN = "Run it once more and tell me the new word."

pytestmark = pytest.mark.clients


@pytest.fixture(params=agents.AGENTS)
def agent(request):
    agent = agents.AGENTS[request.param]
    assert agent.path.exists(), "not installed; make test-clients installs it"
    return agent


@pytest.fixture
def project(tmp_path):
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.fixture
def ask(agent, house, tmp_path, project):
    """ask(prompt, again=): one run that has to go well, in a folder and a HOME that stay; its words and the tool's."""
    def ask(prompt, again=False):
        ran = agents.run(agent, house.server.url, prompt, tmp_path / "agent", project, again)
        assert ran.code == 0, f"exit code {ran.code}\n{ran.out}\n{ran.err}"
        return ran.out, (project / "tool_output.txt").read_text()

    return ask


def goes_on(turn, before):
    """The cache record of a turn, once it is sure that all of the turn before, and of its answer, was reused."""
    (asked, _, answered), (_, cache, _) = before, turn
    assert cache["cached_tokens"] >= asked["prompt_tokens"] + answered["generated_tokens"], cache["because"]
    return cache


def test_a_tool_task_is_done_from_live_state(ask, house):
    out, written = ask(TASK)
    assert written == "heron-0\n" and "The tool printed 'heron-0'." in out
    call, told = house.turns()
    assert call[2]["finish"] == "tool_calls"
    assert goes_on(told, call)["cache_source"] not in ("none", "disk-text")


def test_a_conversation_goes_on_after_a_restart_from_disk(ask, house):
    ask(TASK)
    before = house.turns()[-1]
    house.restart()
    out, written = ask(AGAIN, again=True)
    assert written == "heron-1\n" and "The tool printed 'heron-1'." in out
    call, told = house.turns()
    assert goes_on(call, before)["cache_source"] == "disk-text"
    assert goes_on(told, call)["cache_source"] not in ("none", "disk-text")


def shells(name, key):
    """Two calls at once of an agent's shell, the slower one first."""
    return [(name, {key: "sleep 1 && cat notes.txt > tool_output.txt"}), (name, {key: "echo second"})]


def steps(name, path):
    """What each agent is to do: its own tools, with spacing, key order and numbers that a client is free to change."""
    text = "one  \nzwei \u00fc \t\nthree"
    return {
        "claude": [[("Write", {"content": text, "file_path": path})],
                   [("Edit", {"new_string": "two", "old_string": "zwei", "file_path": path})],
                   [("ToolSearch", {"query": "select:WebFetch", "max_results": 1})],
                   [("Bash", {"timeout": 5000.0, "command": "true"})],
                   shells("Bash", "command")],
        "codex": [[("exec_command", {"yield_time_ms": 5000, "cmd": f"printf 'one\\ntwo\\n' > {path}"})],
                  [("close_agent", {"target": "nobody"})],   # of a namespace, which the call has to name
                  shells("exec_command", "cmd")],
        "opencode": [[("write", {"filePath": path, "content": text})],
                     [("edit", {"newString": "two", "oldString": "zwei", "filePath": path})],
                     shells("bash", "command")],
        "pi": [[("write", {"content": text, "path": path})],
               [("edit", {"edits": [{"newText": "two", "oldText": "zwei"}], "path": path})], shells("bash", "command")],
    }[name]


def test_changed_arguments_and_parallel_calls_cost_no_token(agent, ask, house, project):
    todo = steps(agent.name, str(project / "notes.txt"))
    house.restart(working_off(todo))
    out, written = ask(TASK)
    assert "two" in written and f"All {len(todo)} steps are done." in out
    turns = house.turns()
    assert len(turns) == len(todo) + 1 and "unsupported call" not in turns[-1][0]["prompt"]
    for before, turn in zip(turns, turns[1:]):
        assert goes_on(turn, before)["cache_source"] not in ("none", "disk-text")


@pytest.mark.slow
def test_a_minute_of_silence_is_waited_out(ask, house):
    silences = iter([60.0])    # as a long prompt on a slow machine; the other slices are quick
    house.server.stub.before_prefill = lambda: time.sleep(next(silences, 0))
    out, _ = ask(TASK)
    assert "The tool printed 'heron-0'." in out
    assert [answered["finish"] for _, _, answered in house.turns()] == ["tool_calls", "stop"]   # nothing asked twice
