"""What every API lets a client decide in much the same words: sampling, limits, stop strings, thinking, the model."""
import secrets
from collections.abc import Iterator
from typing import TypeVar

from ds4mlx.chat.dialects.deepseek_v4 import parse_effort
from ds4mlx.chat.messages import Effort, Json
from ds4mlx.config import Settings
from ds4mlx.engine.protocol import SAMPLING_BOUNDS, Sampling
from ds4mlx.errors import BadRequest
from ds4mlx.server.fields import Fields

T = TypeVar("T")

MODEL = "deepseek-v4-flash"
ALIASES = {"deepseek-chat": False, "deepseek-reasoner": True, "deepseek-v4-pro": None}  # thinking; None: as usual
MAX_STOPS, MAX_STOP_BYTES = 64, 1024
MAX_TOP_LOGPROBS = 20
MOST_TOP_K = SAMPLING_BOUNDS["top_k"][1]   # as all, in every vocabulary


def model_names(settings: Settings) -> tuple[str, ...]:
    """Every name that this server knows for its model, the canonical one first."""
    return (MODEL, *ALIASES, *settings.served_model_name)


def read_model(body: Fields, settings: Settings) -> str:
    """The name to echo. Any is accepted, because clients use names of their own; unless the server is strict."""
    name = body.string("model") or MODEL
    if settings.strict_model and name not in model_names(settings):
        raise BadRequest(f"model {name!r} is not served here; known are {', '.join(model_names(settings))}",
                         param="model", code="model_not_found", status=404)
    return name


def read_sampling(body: Fields, settings: Settings, top_logprobs: int = 0) -> Sampling:
    """Sampling fields, the server's defaults where the client says nothing."""
    seed = body.integer("seed")
    return Sampling(
        temperature=_or(body.number("temperature", 0, 2), _or(settings.temp, Sampling().temperature)),
        top_p=_or(body.number("top_p", 0, 1), settings.top_p),
        top_k=min(max(0, _or(body.integer("top_k", -1), settings.top_k)), MOST_TOP_K),
        min_p=_or(body.number("min_p", 0, 1), settings.min_p),
        seed=secrets.randbits(64) if seed is None else seed % (1 << 64),
        logit_bias=_read_bias(body.object("logit_bias")),
        presence_penalty=_or(body.number("presence_penalty", -2, 2), 0.0),
        frequency_penalty=_or(body.number("frequency_penalty", -2, 2), 0.0),
        repetition_penalty=_or(body.number("repetition_penalty", 0.01, 10), 1.0),
        top_logprobs=top_logprobs)


def _or(value: T | None, default: T) -> T:
    return default if value is None else value


def _read_bias(bias: Fields | None) -> dict[int, float]:
    if bias is None:
        return {}
    for token in bias.members:
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise BadRequest(f"logit_bias names token {token[:40]!r}, need token ids", param="logit_bias")
    read = {int(token): bias.number(token, -100, 100) for token in bias.members}
    return {token: value for token, value in read.items() if value is not None}


def read_logprobs(body: Fields) -> tuple[bool, int]:
    """Whether log-probabilities are wanted, and how many alternatives of each token."""
    wanted, top = body.boolean("logprobs") or False, body.integer("top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top and not wanted:
        raise BadRequest(f"top_logprobs is {top} without logprobs; set logprobs to true", param="top_logprobs")
    return wanted, top


def read_stop(body: Fields, member: str = "stop") -> tuple[str, ...]:
    """Stop strings: one, or an array of them; empty ones stop nothing."""
    one = body.get(member)
    stops = [one] if isinstance(one, str) else body.array(member) or []
    if len(stops) > MAX_STOPS:
        raise BadRequest(f"{member} has {len(stops)} entries, {MAX_STOPS} are allowed", param=member)
    numbered = Fields({str(i): stop for i, stop in enumerate(stops)}, member)
    texts = [numbered.string(i) or "" for i in numbered.members]
    for text in texts:
        if len(text.encode()) > MAX_STOP_BYTES:
            raise BadRequest(f"{member} has an entry of {len(text.encode())} bytes, {MAX_STOP_BYTES} are allowed",
                             param=member)
    return tuple(dict.fromkeys(text for text in texts if text))


def read_thinking(body: Fields, model: str, settings: Settings) -> tuple[bool, Effort | None]:
    """Whether to think, and how hard (None: the server's default).

    Clients spell it in many ways; where a request contradicts itself, off wins. Then the model's alias decides, then
    the server's default.
    """
    wishes = list(_switches(body))
    efforts = [parse_effort(effort, "0731") for effort in _efforts(body)]
    wishes += [effort != "off" for effort in efforts]
    level = next((effort for effort in efforts if effort != "off"), None)
    if wishes:
        return all(wishes), level
    alias = ALIASES.get(model)
    return settings.default_thinking if alias is None else alias, level


def read_most_reasoning(body: Fields, settings: Settings) -> int | None:
    """`thinking.budget_tokens`, on a server that keeps to it; elsewhere effort alone says how long to think."""
    thinking = body.get("thinking")
    if not settings.honor_thinking_budget or not isinstance(thinking, dict):
        return None
    return Fields(thinking, "thinking").integer("budget_tokens", 0)


def _switches(body: Fields) -> Iterator[bool]:
    template = body.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
    for place, member in ((body, "think"), (body, "enable_thinking"), (template, "thinking"),
                          (template, "enable_thinking")):
        if (switch := place.boolean(member)) is not None:
            yield switch
    thinking = body.get("thinking")
    if isinstance(thinking, dict):
        kind = Fields(thinking, "thinking").choice("type", ("enabled", "disabled", "adaptive", "auto"))
        if kind is not None:
            yield kind != "disabled"
    elif thinking is not None:
        if not isinstance(thinking, bool):
            raise body.error("thinking", "true, false or an object with a type")
        yield thinking


def _efforts(body: Fields) -> Iterator[str | int | float]:
    template = body.object("chat_template_kwargs") or Fields({}, "chat_template_kwargs")
    reasoning = body.object("reasoning") or Fields({}, "reasoning")
    output = body.object("output_config") or Fields({}, "output_config")
    for place, member in ((body, "reasoning_effort"), (template, "reasoning_effort"), (reasoning, "effort"),
                          (output, "effort"), (body, "think_level")):
        value: Json = place.get(member)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise place.error(member, "an effort: none, low, high, max, or 1 to 100")
        yield value
