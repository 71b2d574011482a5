"""Settings: one frozen dataclass. Defaults <- file <- environment <- flags; nobody else reads os.environ."""
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything a run can be told. Sizes in tokens unless the name says otherwise."""
    # model and engine
    model: Path | None = None                   # None: ./ds4flash.gguf if there, else the built-in tiny model
    engine: Literal["mlx", "stub"] = "mlx"
    ctx: int = 32768
    prefill_chunk: int = 2048                   # a multiple of 128
    memory_limit_gb: float | None = None        # None: 85 % of what the device recommends
    kv_round: Literal["official", "none"] = "official"
    power: int = 100                            # duty cycle, percent
    lock: bool = True                           # one big model per machine
    # prompts
    prompt_layout: Literal["official", "tools-first"] = "official"
    effort_profile: Literal["auto", "0731", "preview"] = "auto"
    default_thinking: bool = True
    default_effort: Literal["low", "high", "max"] | None = None   # None: by profile
    think_max_min_ctx: int | None = None        # None: by profile; 0: no gate
    sort_tools: bool = False
    # sampling, where a request says nothing
    tokens: int = 393216
    temp: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.05
    top_k: int = 0
    # server
    host: str = "127.0.0.1"                     # IPv4, IPv6 or unix:PATH
    port: int = 8000
    cors: bool = False
    allow_host: tuple[str, ...] = ()
    api_key: str | None = None
    access_log: bool = False
    served_model_name: tuple[str, ...] = ()
    strict_model: bool = False
    max_queue: int = 0                          # 0: unlimited
    max_body_mb: int = 64
    sse_keepalive_seconds: float = 5.0          # 0: none
    send_stall_timeout: float = 30.0
    drain_seconds: float = 30.0
    reasoning_field: Literal["content", "both"] = "content"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
