"""A conversation into the prompt that a model reads: text, ids, and the keys that find its states."""
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ds4mlx.chat.canonical import canonical
from ds4mlx.chat.dialects.deepseek_v4 import DEFAULT_EFFORT, gate_effort, render
from ds4mlx.chat.dialects.deepseek_v4_templates import EffortProfile
from ds4mlx.chat.dialects.prompt import Prompt, Replay
from ds4mlx.chat.messages import Conversation, Effort, Message, TextPart, ToolCall, ToolResult
from ds4mlx.config import Settings
from ds4mlx.errors import BadRequest
from ds4mlx.service.turn import EncodedPrompt, Turn
from ds4mlx.sessions.explain import Origin
from ds4mlx.sessions.lookup import Api, TrailingResults, Wanted
from ds4mlx.sessions.replay import Call, ToolMemory
from ds4mlx.text.keys import key_with_ends
from ds4mlx.text.segments import EOS, Control, Segment, Text
from ds4mlx.text.tokenizer import Tokenizer

HOPELESS_CHARACTERS = 8  # to a token of the context: text that may still fit has 3 to 5
PIECE_CHARACTERS = 1 << 16


class Encoder:
    """Of the turns for one model and one context. It may be used from several threads."""

    def __init__(self, tokenizer: Tokenizer, settings: Settings, effort_profile: EffortProfile,
                 tool_memory: ToolMemory, context: Callable[[], int]) -> None:
        """context: most tokens of prompt and answer together, once it is known."""
        self.tokenizer, self.settings, self.effort_profile = tokenizer, settings, effort_profile
        self._tool_memory, self._context = tool_memory, context

    def encode(self, turn: Turn) -> tuple[Conversation, EncodedPrompt]:
        """The conversation as it is rendered, and its prompt. Raises BadRequest.

        Takes a while for a long conversation. The two parts may be encoded apart: the second, where there is one,
        begins with a control token."""
        conversation = settled(turn.conversation, self.settings, self.effort_profile, self._context(), turn.api)
        calls = {i: [Call(part.id, part.name, part.arguments) for part in message.parts if isinstance(part, ToolCall)]
                 for i, message in enumerate(conversation.messages) if message.role == "assistant"}
        replays = self._tool_memory.replays(calls, {tool.name: tool.schema for tool in conversation.tools})
        replay = {i: Replay(block.lead, block.ids, block.text) for i, block in replays.blocks.items()}
        prompt = self._render(conversation, replay)
        self.check_hopeless(prompt.segments, turn)
        said, opening = prompt.segments[:prompt.ends[-1]], prompt.segments[prompt.ends[-1]:]
        ids, header = self.tokenizer.encode(said), self.tokenizer.encode(opening)
        key, ends = key_with_ends(self.tokenizer, prompt.segments)
        ends = [0, *ends]
        origins = tuple(Origin(f"messages[{i}]", ends[end]) for i, end in enumerate(prompt.ends))
        wanted = Wanted(ids + header, key, turn.api,
                        _trailing_results(conversation, origins, turn.api))

        def key_of_answer(message: Message, block: Replay | None, whole: bool) -> bytes:
            return self._key_of_answer(conversation, replay, message, block, whole)

        return conversation, EncodedPrompt(wanted, prompt.segments, len(header), prompt.thinking, origins,
                                           key_of_answer, replays)

    def _render(self, conversation: Conversation, replay: Mapping[int, Replay]) -> Prompt:
        return render(conversation, effort_profile=self.effort_profile, layout=self.settings.prompt_layout,
                      replay=replay)

    def _key_of_answer(self, conversation: Conversation, replay: Mapping[int, Replay], message: Message,
                       block: Replay | None, whole: bool) -> bytes:
        """The key of the conversation up to the end of an answer to it, rendered as the next request will be."""
        messages = conversation.messages
        if conversation.continue_final and messages[-1].role == "assistant":
            messages, message = messages[:-1], replace(message, parts=(*messages[-1].parts, *message.parts))
        at = len(messages)
        longer = replace(conversation, messages=(*messages, message, Message("user", (TextPart(""),))),
                         continue_final=False)
        prompt = self._render(longer, {**replay, at: block} if block else replay)
        segments = prompt.segments[:prompt.ends[at]]
        if not whole and segments[-1] == Control(EOS):   # a cut answer may be gone on with
            segments = segments[:-1]
        return self.tokenizer.key_bytes(segments)

    def check_length(self, prompt_tokens: int, turn: Turn, said: str = "") -> None:
        """Raises BadRequest for a prompt that leaves no room for an answer."""
        context = self._context()
        if prompt_tokens >= context:
            raise BadRequest(
                f"prompt is {said}{prompt_tokens} tokens, context size is {context} tokens: this server's maximum "
                f"context length is {context} tokens, and the answer needs one at least; shorten the conversation",
                param=turn.param, code="context_length_exceeded",
                details={"n_prompt_tokens": prompt_tokens, "n_ctx": context})

    def check_hopeless(self, segments: Sequence[Segment], turn: Turn) -> None:
        """Refuse a prompt that is far too long by its beginning: 4 MB of digits took 15 s and 1.7 GB to encode.

        Pieces encoded apart have a few more tokens than together, so only twice the context is too long for sure.
        """
        texts = [segment.text for segment in segments if isinstance(segment, Text)]
        if sum(map(len, texts)) <= HOPELESS_CHARACTERS * self._context():
            return
        tokens = 0
        for text in texts:
            for start in range(0, len(text), PIECE_CHARACTERS):
                tokens += len(self.tokenizer.encode_literal(text[start:start + PIECE_CHARACTERS]))
                if tokens > 2 * self._context():
                    self.check_length(tokens, turn, "at least ")


def _trailing_results(conversation: Conversation, origins: Sequence[Origin], api: Api) -> TrailingResults | None:
    """The tool results that a request ends with, and where the turn ends that made their calls.

    Clients of the Responses API may send them alone, to go on from the state that waits for them.
    """
    messages = conversation.messages
    results: set[str] = set()
    for i in range(len(messages) - 1, -1, -1):
        found = {part.call_id for part in messages[i].parts if isinstance(part, ToolResult)}
        if messages[i].role == "assistant":
            made = {part.id for part in messages[i].parts if isinstance(part, ToolCall)}
            return TrailingResults(frozenset(results), origins[i].end) if results and results <= made else None
        results |= found
    said = {type(part) for message in messages if message.role != "system" for part in message.parts}
    return TrailingResults(frozenset(results), alone=True) if api == "responses" and said == {ToolResult} else None


def wanted_effort(conversation: Conversation, settings: Settings, profile: EffortProfile, api: Api = "chat") -> Effort:
    """As hard as the request says, else the settings, else the profile."""
    by_default = settings.effort("messages" if api == "anthropic" else api)
    return conversation.effort or by_default or DEFAULT_EFFORT[profile]


def settled(conversation: Conversation, settings: Settings, profile: EffortProfile, context: int,
            api: Api = "chat") -> Conversation:
    """The conversation as it is rendered: without client noise, with its effort decided, its tools in order."""
    wanted = wanted_effort(conversation, settings, profile, api)
    effort = gate_effort(wanted, profile, context, settings.think_max_min_ctx)
    tools = conversation.tools
    if settings.sort_tools:
        tools = tuple(sorted(tools, key=lambda tool: tool.name))
    return replace(canonical(conversation), effort=effort, tools=tools)


def prompt_for(conversation: Conversation, settings: Settings, metadata: Mapping[str, object]) -> Prompt:
    """The prompt that a server with these settings makes of a conversation, for a model file's `metadata`."""
    profile = effort_profile(settings, metadata)
    return render(settled(conversation, settings, profile, settings.ctx), effort_profile=profile,
                  layout=settings.prompt_layout)


def as_recommended(settings: Settings, metadata: Mapping[str, object]) -> Settings:
    """The settings, with the temperature that the model file recommends where they say none."""
    told = metadata.get("general.sampling.temp")
    return replace(settings, temp=float(told)) if settings.temp is None and isinstance(told, int | float) else settings


def effort_profile(settings: Settings, metadata: Mapping[str, object]) -> EffortProfile:
    """Which effort texts the checkpoint was trained on: as set, else by the checkpoint's name in the file."""
    if settings.effort_profile != "auto":
        return settings.effort_profile
    names = [metadata.get("ds4mlx.checkpoint"), metadata.get("general.name")]
    name = next((name for name in names if isinstance(name, str) and name), "")
    return "0731" if "0731" in name else "preview"
