"""Both official Python SDKs do a task with a tool: call, result, final text, from memory and over a restart."""
import json
import subprocess

import anthropic
import openai
import pytest

SCHEMA = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
TASK = "Run a command that prints a word, then tell me the word."
SYSTEM = "You work in a folder with a shell. " * 100   # long enough to be worth a file


def shell(command, folder):
    return subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=True).stdout


class Chat:
    """One conversation over Chat Completions. `ask` gives the calls as (id, arguments) and the text."""

    def __init__(self):
        self.history = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": TASK}]

    def ask(self, url):
        tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as client:
            with client.chat.completions.stream(model="any", messages=self.history, tools=tools,
                                                stream_options={"include_usage": True}) as stream:
                message = stream.get_final_completion().choices[0].message
        self.history.append(message.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
        return [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or ()], message.content

    def tell(self, call, result):
        self.history.append({"role": "tool", "tool_call_id": call, "content": result})


class Responses:
    """The same over Responses, every item sent back."""

    def __init__(self):
        self.items = [{"role": "developer", "content": SYSTEM}, {"role": "user", "content": TASK}]

    def ask(self, url):
        tools = [{"type": "function", "name": "bash", "parameters": SCHEMA}]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="local", max_retries=0) as client:
            with client.responses.stream(model="any", input=self.items, tools=tools) as stream:
                response = stream.get_final_response()
        self.items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        return [(call.call_id, json.loads(call.arguments)) for call in calls], response.output_text

    def tell(self, call, result):
        self.items.append({"type": "function_call_output", "call_id": call, "output": result})


class Messages:
    """The same over Messages with Anthropic's client."""

    def __init__(self):
        self.history = [{"role": "user", "content": TASK}]

    def ask(self, url):
        tools = [{"name": "bash", "input_schema": SCHEMA}]
        with anthropic.Anthropic(base_url=url, api_key="local", max_retries=0) as client:
            with client.messages.stream(model="any", max_tokens=1024, system=SYSTEM, tools=tools,
                                        messages=self.history) as stream:
                message = stream.get_final_message()
        self.history.append({"role": "assistant", "content": message.content})
        calls = [part for part in message.content if part.type == "tool_use"]
        return ([(call.id, call.input) for call in calls],
                "".join(part.text for part in message.content if part.type == "text"))

    def tell(self, call, result):
        self.history.append({"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": call, "content": result}]})


@pytest.mark.parametrize("api", [Chat, Responses, Messages])
@pytest.mark.parametrize("restarted", [False, True])
def test_a_tool_task_is_done_and_goes_on_from_what_was_computed(house, tmp_path, api, restarted):
    conversation = api()
    [(call, arguments)], _ = conversation.ask(house.server.url)
    (asked, _, called), = house.turns()
    conversation.tell(call, shell(arguments["command"], tmp_path))
    calls, text = conversation.ask((house.restart() if restarted else house.server).url)
    assert (calls, text) == ([], "The tool printed 'heron-0'.")
    assert (tmp_path / "tool_output.txt").read_text() == "heron-0\n"
    _, cache, _ = house.turns()[-1]
    assert cache["cached_tokens"] == asked["prompt_tokens"] + called["generated_tokens"] + 1  # the end of the answer
    assert (cache["cache_source"] == "disk-text") == restarted and cache["cache_source"] != "none"
