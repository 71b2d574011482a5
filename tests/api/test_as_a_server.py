"""A session of a model loaded here answers as a server does, turn for turn, token for token."""
import asyncio
from dataclasses import replace

import pytest

import ds4mlx as ds
from ds4mlx.api.rendering import Style, answer_message, request
from ds4mlx.chat.events import gather
from ds4mlx.server.fields import Fields
from ds4mlx.server.openai_chat import read_chat
from ds4mlx.service.service import open_service

GREEDY = ds.Sampling(temperature=0)
LOOK = {"type": "function", "function": {"name": "look", "strict": True, "parameters": {
    "type": "object", "properties": {"at": {"enum": ["sea", "sky"]}}, "required": ["at"],
    "additionalProperties": False}}}
NUMBER = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": ["one", "two"]}}}


def result(call_id):
    return [{"role": "tool", "tool_call_id": call_id, "content": "blue"}]


TALKS = {   # turns: what is said, or a function of the last call's id; and how it is asked
    "calls": [("Look!", {"tools": [LOOK], "tool_choice": "required", "thinking": False}), (result, {"max_tokens": 6}),
              ("And?", {"max_tokens": 6})],
    "reasoning": [("What?", {"thinking": True, "max_tokens": 200}), ("And?", {"max_tokens": 8})],
    "format": [("A number", {"thinking": False, "response_format": NUMBER}), ("And?", {"max_tokens": 6})]}


def here(model, talk):
    with model.session() as session:
        told, answer = [], None
        for said, asked in talk:
            said = said if isinstance(said, str) else said(answer.call_ids[0])
            answer = session.chat(said, sampling=GREEDY, **asked).wait()
            told.append((answer.reasoning, answer.text, answer.calls, answer.finish.usage.prompt_tokens))
        return told, session.tokens


async def served(path, talk):
    service = open_service(ds.Settings(model=path, ctx=1024))
    await service.start()
    try:
        told, messages, style, answer = [], [], Style(), None
        for said, asked in talk:
            messages += [{"role": "user", "content": said}] if isinstance(said, str) else said(answer.call_ids[0])
            style = Style(tuple(asked.get("tools", style.tools)), asked.get("thinking", style.thinking))
            body = request(messages, style, asked.get("tool_choice"), asked.get("response_format"))
            turn = read_chat(Fields(body), service.settings).turn
            events = [event async for event in await service.run(
                replace(turn, sampling=GREEDY, max_tokens=asked.get("max_tokens")))]
            answer = gather(events)
            told.append((answer.reasoning, answer.content, answer.calls, events[-1].usage.prompt_tokens))
            messages.append(answer_message(answer.content, answer.reasoning, answer.calls, answer.call_ids))
        return told, list(service.scheduler.slots[0].session.tokens)
    finally:
        await service.close(5)


@pytest.mark.parametrize("talk", TALKS.values(), ids=TALKS)
def test_answers_and_states_are_the_same(model, tiny_path, talk):
    there, state = asyncio.run(served(tiny_path, talk))
    told, tokens = here(model, talk)
    assert told == there
    assert tokens[:len(state)] == state     # the last sampled token may not be fed yet, here or there
