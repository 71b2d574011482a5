"""Settings: one frozen dataclass. Defaults <- file <- environment <- flags; nobody else reads os.environ."""
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType
from typing import Literal, Self, cast, get_args, get_origin, get_type_hints

from ds4mlx.errors import UsageError

PREFIX = "DS4MLX_"
# Each may have a section in a file.
COMMANDS = ("chat", "run", "serve", "tokens", "logits", "logprobs", "perplexity", "compare", "inspect", "cache",
            "trace", "wire", "bench", "eval", "doctor", "quantize", "top", "completion")


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a run can be told. Sizes in tokens unless the name says otherwise."""
    # model and engine
    model: Path | None = None                   # None: ./ds4flash.gguf if there, else the built-in tiny model
    engine: Literal["mlx", "cuda", "stub"] = "mlx"
    ctx: int = 32768
    prefill_chunk: int = 2048                   # a multiple of 128
    memory_limit_gb: float | None = None        # None: 85 % of what the device recommends
    kv_round: Literal["official", "none"] = "official"
    quality: bool = False                       # exact paths where a fast one rounds more
    ops: Literal["auto", "reference", "cpu", "metal", "metal-emulated", "cuda"] = "auto"  # who computes
    power: int = 100                            # duty cycle, percent
    warm_weights: bool = False                  # read all of a model file when it is opened, not as it is needed
    dir_steering_file: Path | None = None       # directions to steer along, f32 [layers, hidden size]
    dir_steering_ffn: float = 1.0               # how strongly, behind the experts; 1 takes away, negative adds
    dir_steering_attn: float = 0.0              # the same behind the attention
    lock: bool = True                           # one big model per machine
    # prompts
    prompt_layout: Literal["official", "tools-first"] = "official"
    effort_profile: Literal["auto", "0731", "preview"] = "auto"
    default_thinking: bool = True
    default_effort: tuple[str, ...] = ()        # "max", or "messages=max" for one API; none: by profile
    think_max_min_ctx: int | None = None        # None: by profile; 0: no gate
    sort_tools: bool = False
    honor_thinking_budget: bool = False         # `thinking.budget_tokens` of a request ends its reasoning
    # sampling, where a request says nothing
    tokens: int = 393216
    temp: float | None = None                   # None: what the model file recommends, else 1
    top_p: float = 1.0
    min_p: float = 0.05
    top_k: int = 0
    seed: int | None = None                     # None: a fresh one for each answer
    # states to go on from, in memory and on disk
    kv_rewind_points: int = 16                  # earlier lengths of a conversation that can be gone back to
    kv_disk_dir: Path | None = None             # None: in memory only
    kv_disk_space_mb: int = 4096
    kv_cache_min_tokens: int = 512
    kv_cache_cold_max_tokens: int = 30000       # 0: no cold saves
    kv_cache_continued_interval_tokens: int = 10000     # 0: none while a conversation grows
    kv_cache_boundary_trim_tokens: int = 32
    kv_cache_boundary_align_tokens: int = 2048  # 0: anywhere
    kv_cache_reject_different_quant: bool = False
    kv_cache_verify: Literal["full", "header"] = "full"
    disable_exact_dsml_tool_replay: bool = False
    tool_memory_max_ids: int = 100000
    # server
    chdir: Path | None = None                   # where other paths begin that are not absolute
    host: str = "127.0.0.1"                     # IPv4, IPv6 or unix:PATH
    port: int = 8000
    cors: bool = False
    allow_host: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    protect_metrics: bool = False               # GET /metrics needs the key as well
    access_log: bool = False
    diagnostics: bool = False                   # POST /tokenize
    served_model_name: tuple[str, ...] = ()
    strict_model: bool = False
    batched_session: int = 1                    # conversations answered at the same time, each in a slot of its own
    mixed_prefill_quantum: int = 128            # a multiple of 128: prompt tokens between two steps of other slots
    max_queue: int = 0                          # 0: unlimited
    max_body_mb: int = 64
    sse_keepalive_seconds: float = 5.0          # 0: none
    send_stall_timeout: float = 30.0
    drain_seconds: float = 30.0
    reasoning_field: Literal["content", "both"] = "content"
    anthropic_usage: Literal["split", "flat"] = "split"   # flat: what was computed is input, not a write to the cache
    responses_store: int = 256                  # that a request may refer to by id; 0: none
    always_seal: bool = False                   # reasoning, for clients that do not ask for it
    raw_reasoning_events: bool = False
    trace: Path | None = None                   # conversations in full, and why what of them was computed again
    trace_format: Literal["text", "jsonl"] = "text"
    trace_max_mb: int = 0                       # 0: any size
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False                      # a JSON object a line, in place of text

    @classmethod
    def load(cls, command: str, flags: Mapping[str, object], environment: Mapping[str, str] | None = None) -> Self:
        """The settings of one command: flags, else environment, else the `--config` file, else the default.

        `flags` maps option names in snake case, `config` among them, to text or typed values; None is not given, and
        names of no setting are skipped. Raises UsageError naming the option, variable or key at fault.
        """
        environment = os.environ if environment is None else environment
        given = {name: value for name, value in flags.items() if value is not None}
        file = given.get("config") or environment.get(f"{PREFIX}CONFIG")
        sources = [*_from_file(Path(str(file)), command)] if file else []
        sources += [*_from_environment(environment), *_from_flags(given)]
        chosen = {name: (value, told) for name, value, told in sources}
        values = {name: _parsed(name, value, told) for name, (value, told) in chosen.items()}
        settings = replace(cls(), **values)     # type: ignore[arg-type]  # each was parsed into its field's type
        _check_cold_saves(settings)
        return settings

    def checked(self) -> Self:
        """The same settings, for those made in Python. Raises UsageError naming one that is impossible."""
        values = {field.name: getattr(self, field.name) for field in fields(self)
                  if getattr(self, field.name) != field.default}
        parsed = {name: _parsed(name, value, f"settings.{name}") for name, value in values.items()}
        settings = replace(self, **parsed)      # type: ignore[arg-type]  # each was parsed into its field's type
        _check_cold_saves(settings)
        return settings

    def __repr__(self) -> str:
        """What is not the default, and never the key."""
        told = (f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)
                if field.repr and getattr(self, field.name) != field.default)
        return f"Settings({', '.join(told)})"

    def effort(self, api: str) -> Literal["low", "high", "max"] | None:
        """How hard to think by default in an API, as chat or messages: its own effort, else that of all, if any."""
        given = dict(entry.rpartition("=")[::2] for entry in self.default_effort)
        return cast(Literal["low", "high", "max"] | None, given.get(api, given.get("")))


BOUNDS: dict[str, tuple[float, float]] = {
    "ctx": (1, 1 << 24), "prefill_chunk": (128, 1 << 20), "memory_limit_gb": (1e-3, 1e6), "power": (1, 100),
    "think_max_min_ctx": (0, 1 << 24), "tokens": (1, 1 << 24), "temp": (0, 100), "top_p": (0, 1), "min_p": (0, 1),
    "top_k": (0, 1 << 24), "seed": (0, (1 << 64) - 1), "port": (0, 65535), "batched_session": (1, 16),
    "mixed_prefill_quantum": (128, 1 << 20), "max_queue": (0, 1 << 20), "max_body_mb": (1, 1 << 16),
    "dir_steering_ffn": (-1000, 1000), "dir_steering_attn": (-1000, 1000),
    "sse_keepalive_seconds": (0, 86400), "send_stall_timeout": (0.1, 86400), "drain_seconds": (0, 86400),
    "kv_rewind_points": (1, 256),
    "kv_disk_space_mb": (1, 1 << 30), "kv_cache_min_tokens": (1, 1 << 24),
    "kv_cache_cold_max_tokens": (0, 1 << 24), "kv_cache_continued_interval_tokens": (0, 1 << 24),
    "kv_cache_boundary_trim_tokens": (0, 1 << 20), "kv_cache_boundary_align_tokens": (0, 1 << 20),
    "tool_memory_max_ids": (1, 1 << 24), "responses_store": (0, 1 << 20), "trace_max_mb": (0, 1 << 20),
}
EFFORT = re.compile("((chat|messages|responses)=)?(low|high|max)")
TRUE, FALSE = ("1", "on", "true", "yes"), ("0", "off", "false", "no")


def state_dir() -> Path:
    """Where locks and sessions live: DS4MLX_HOME, else ~/.ds4mlx. Not created here."""
    named = os.environ.get(f"{PREFIX}HOME")
    return Path(named) if named else _home() / ".ds4mlx"


def cache_dir() -> Path:
    """The user's cache of things that can be made again. Not created here."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named and Path(named).is_absolute():  # the XDG rule: a relative path is to be ignored
        return Path(named) / "ds4mlx"
    return _home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "ds4mlx"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:
        raise UsageError("HOME is not set and this user has no home directory; set HOME to one") from None


def color_wanted(choice: Literal["auto", "always", "never"], terminal: bool) -> bool:
    """Whether to colour a stream; NO_COLOR, set to anything, turns "auto" off, and so does a terminal that is dumb."""
    return choice == "always" or choice == "auto" and terminal and not dumb() and not os.environ.get("NO_COLOR")


def suggest(values: Mapping[str, str]) -> None:
    """To libraries that read the environment themselves: what they take where nothing is set."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def dumb() -> bool:
    """Whether the terminal, if there is one, says that it can move no cursor."""
    return os.environ.get("TERM") == "dumb"


Given = tuple[str, object, str]  # setting, its value, what to call it in an error


def _from_flags(given: Mapping[str, object]) -> Iterator[Given]:
    for field in fields(Settings):
        if field.name in given:
            yield field.name, given[field.name], "--" + field.name.replace("_", "-")


def _from_environment(environment: Mapping[str, str]) -> Iterator[Given]:
    """Every long flag has its variable; an empty one counts as not set."""
    if negated := environment.get(f"{PREFIX}NO_LOCK"):
        yield "lock", not _switch(negated, f"{PREFIX}NO_LOCK"), f"{PREFIX}NO_LOCK"
    for field in fields(Settings):
        variable = PREFIX + field.name.upper()
        if value := environment.get(variable):
            yield field.name, value.split(",") if _kind(field.name) is tuple else value, variable


def _from_file(path: Path, command: str) -> Iterator[Given]:
    """Keys at the top are for every command, those of `[COMMAND]` for one. Keys are flags, with - or _."""
    import tomllib
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except OSError as fault:
        raise UsageError(f"--config {path}: {fault.strerror}; give the path of a TOML file") from fault
    except ValueError as fault:
        raise UsageError(f"--config {path}: not TOML in UTF-8 ({fault}); correct the file") from fault
    sections = {key: value for key, value in content.items() if isinstance(value, dict)}
    if unknown := sections.keys() - set(COMMANDS):
        raise UsageError(f"--config {path}: unknown section [{min(unknown)}]; sections are {', '.join(COMMANDS)}")
    yield from _keys(path, "", {key: value for key, value in content.items() if key not in sections})
    for name, section in sections.items():
        checked = list(_keys(path, f"[{name}] ", section))
        yield from checked if name == command else ()


def _keys(path: Path, section: str, table: Mapping[str, object]) -> Iterator[Given]:
    known = {field.name for field in fields(Settings)}
    for key, value in table.items():
        name, told = key.replace("-", "_"), f"{path}: {section}{key}"
        if name == "no_lock":
            name, value = "lock", not _parsed("lock", value, told)
        if name not in known:
            raise UsageError(f"--config {path}: unknown key {section}{key}; keys are the long options of the commands")
        yield name, value, told


def _kind(name: str) -> type:
    """The type of a setting that is given: `int` for `int | None`, `tuple` for `tuple[str, ...]`."""
    return cast(type, get_origin(_given_type(name)) or _given_type(name))


def _given_type(name: str) -> type:
    hint = get_type_hints(Settings)[name]
    alternatives = get_args(hint)
    given: type = next(t for t in alternatives if t is not NoneType) if NoneType in alternatives else hint
    return given


def _parsed(name: str, value: object, told: str) -> object:
    """A value from any source in the setting's type. Raises UsageError: `told`, what was found, what is needed."""
    if get_origin(_given_type(name)) is Literal:
        choices = get_args(_given_type(name))
        if value not in choices:
            raise _wrong(told, value, f"one of {', '.join(choices)}")
        return value
    kind = _kind(name)
    if kind is bool:
        return value if isinstance(value, bool) else _switch(value, told)
    if kind is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) and item for item in value):
            raise _wrong(told, value, "names that are not empty")
        if name == "default_effort" and not all(map(EFFORT.fullmatch, value)):
            raise _wrong(told, ",".join(value), "low, high or max, or such as messages=max for one API")
        return tuple(value)
    if kind in (int, float):
        return _number(name, value, told, kind)
    if not isinstance(value, str | Path) or not str(value):
        raise _wrong(told, "hidden" if name == "api_key" else value, "text")
    return kind(value)


def _number(name: str, value: object, told: str, kind: type[int] | type[float]) -> int | float:
    low, high = BOUNDS[name]
    needed = f"a {'whole ' if kind is int else ''}number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, str | int | (float if kind is float else int)):
        raise _wrong(told, value, needed)
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        raise _wrong(told, value, needed) from None
    if not math.isfinite(number) or not low <= number <= high:
        raise _wrong(told, value, needed)
    if name in ("prefill_chunk", "mixed_prefill_quantum") and number % 128:
        raise _wrong(told, value, "a multiple of 128")
    return number


def _switch(value: object, told: str) -> bool:
    if isinstance(value, str) and value.lower() in TRUE + FALSE:
        return value.lower() in TRUE
    raise _wrong(told, value, "on or off")


def _check_cold_saves(settings: Settings) -> None:
    """A beginning that is long enough for a file must not be too long for one."""
    most, least = settings.kv_cache_cold_max_tokens, settings.kv_cache_min_tokens
    if 0 < most < least:
        raise _wrong("--kv-cache-cold-max-tokens", most, f"0 or at least the {least} of --kv-cache-min-tokens")


def _wrong(told: str, value: object, needed: str) -> UsageError:
    return UsageError(f"{told} is {str(value)[:80]!r}, need {needed}")
