"""An agent with subagents over HTTP, as coding agents send them: nobody's conversation is computed twice."""
from concurrent.futures import ThreadPoolExecutor

import pytest

SYSTEM = "You are an agent that works with care and says little. " * 30
TOOLS = [{"name": "bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}]
ANSWER = ('Look.</think>I look.\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="bash">\n'
          '<｜DSML｜parameter name="command" string="true">ls</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
OUTPUT = "some output of a command, a line of it. " * 10
TURNS, SUBAGENTS = 12, 5


class Thread:
    """A conversation by the Messages API, which sends no reasoning back. `state`: tokens that the server has of it."""

    def __init__(self, server, name, output=OUTPUT):
        self.server, self.output, self.state = server, output, 0
        self.messages = [{"role": "user", "content": f"Do {name}. {output}"}]

    def turn(self):
        """Tokens that were reused."""
        body = {"system": SYSTEM, "tools": TOOLS, "messages": self.messages, "max_tokens": 1000}
        answer = self.server.post("/v1/messages", json=body).json()
        usage, said = answer["usage"], [block for block in answer["content"] if block["type"] != "thinking"]
        call, = (block["id"] for block in said if block["type"] == "tool_use")
        self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call, "content": self.output}]}]
        reused = usage["cache_read_input_tokens"]
        prompt = reused + usage["input_tokens"] + usage["cache_creation_input_tokens"]
        self.state = prompt + usage["output_tokens"] + 1        # with the end of the answer
        return reused


@pytest.mark.parametrize("slots, at_once", [(3, 1), (6, SUBAGENTS)])
def test_the_main_thread_goes_on_from_all_it_had_beside_five_subagents(serve, slots, at_once):
    server = serve(ANSWER, settings={"batched_session": slots, "ctx": 32768})
    main, subagents = Thread(server, "it", OUTPUT * 3), [Thread(server, f"part {n}", "ok") for n in range(SUBAGENTS)]
    for _ in range(TURNS):
        before = main.state
        assert main.turn() == before
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(Thread.turn, subagents))


def test_more_conversations_than_slots_come_back_from_disk(serve, tmp_path):
    server = serve(ANSWER, settings={"batched_session": 2, "ctx": 32768, "kv_disk_dir": tmp_path / "kv"})
    threads = [Thread(server, name) for name in ("it", *map(str, range(SUBAGENTS)))]
    for number in range(TURNS):
        for thread in threads:
            before = thread.state
            assert thread.turn() >= before - 512 or number == 0
