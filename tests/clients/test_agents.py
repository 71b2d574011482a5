"""Coding agents do a task with a tool on the server, set up as `ds4mlx wire` prints, and go on with it later."""
import agents
import pytest

TASK = "Run a command that prints a word, then tell me the word."
AGAIN = "Run it once more and tell me the new word."

pytestmark = pytest.mark.clients


@pytest.fixture(params=agents.AGENTS)
def agent(request):
    agent = agents.AGENTS[request.param]
    assert agent.path.exists(), "not installed; make test-clients installs it"
    return agent


@pytest.fixture
def ask(agent, house, tmp_path):
    """ask(prompt, again=): one run in a folder and a HOME that stay, which has to go well; its output."""
    project, home = tmp_path / "project", tmp_path / "agent"
    project.mkdir()

    def ask(prompt, again=False):
        ran = agents.run(agent, house.server.url, prompt, home, project, again)
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
