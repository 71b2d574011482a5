"""`ds4mlx serve`: open a model, answer on HTTP until told to stop."""
import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio
    from argparse import _SubParsersAction
    from collections.abc import Callable
    from pathlib import Path

    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import MemoryPlan
    from ds4mlx.service.service import Service
    from ds4mlx.service.trace import Trace

MIB, GIB = 1 << 20, 1 << 30


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags, add_sampling_flags
    parser = subparsers.add_parser(
        "serve", allow_abbrev=False, help="serve the model on HTTP",
        description="A server that speaks OpenAI's and Anthropic's APIs: /v1/chat/completions, /v1/responses, "
                    "/v1/messages, /v1/completions, /v1/models, /health, /stats, /metrics.")
    add_engine_flags(parser)
    add_sampling_flags(parser)
    _add_network_flags(parser.add_argument_group("network"))
    _add_request_flags(parser.add_argument_group("requests"))
    _add_cache_flags(parser.add_argument_group("states to go on from"))
    _add_log_flags(parser.add_argument_group("log and trace"))
    parser.add_argument("--chdir", metavar="DIR", help="begin paths that are not absolute there, but that of --config")
    parser.set_defaults(run=run)


def _add_network_flags(group: ArgumentParser) -> None:
    group.add_argument("--host", metavar="H", help="address to listen on: IPv4, IPv6 or unix:PATH (127.0.0.1)")
    group.add_argument("--port", metavar="N", help="port; 0 takes a free one (8000)")
    group.add_argument("--cors", action="store_true", default=None, help="let web pages of any origin call the API")
    group.add_argument("--allow-host", metavar="H", action="append", help="further Host name to accept; repeatable")
    group.add_argument("--api-key", metavar="K", help="require this key as bearer token or x-api-key")
    group.add_argument("--protect-metrics", action="store_true", default=None, help="require the key for /metrics too")
    group.add_argument("--access-log", action="store_true", default=None, help="log every HTTP request")
    group.add_argument("--max-body-mb", metavar="N", help="largest request body in MiB (64)")
    group.add_argument("--sse-keepalive-seconds", metavar="F",
                       help="silence before a stream gets a sign of life; 0: never (5)")
    group.add_argument("--send-stall-timeout", metavar="F",
                       help="seconds after which a client that reads nothing is dropped (30)")
    group.add_argument("--drain-seconds", metavar="F",
                       help="time for active requests at shutdown (30)")


def _add_request_flags(group: ArgumentParser) -> None:
    group.add_argument("--served-model-name", metavar="NAME", action="append",
                       help="further name of the model; repeatable")
    group.add_argument("--strict-model", action="store_true", default=None, help="refuse unknown model names")
    group.add_argument("--batched-session", metavar="N",
                       help="conversations answered at the same time, each with a state of its own, 1 to 16 (1)")
    group.add_argument("--mixed-prefill-quantum", metavar="N",
                       help="prompt tokens computed between two steps of other conversations (128)")
    group.add_argument("--max-queue", metavar="N", help="requests that may wait; 0: any number (0)")
    group.add_argument("--default-thinking", metavar="on|off", help="where a request says nothing (on)")
    group.add_argument("--default-effort", metavar="[API=]low|high|max", action="append",
                       help="where a request says nothing; API is chat, messages or responses; repeatable")
    group.add_argument("--think-max-min-ctx", metavar="N",
                       help="context below which effort max becomes high; 0: none")
    group.add_argument("--honor-thinking-budget", action="store_true", default=None,
                       help="end reasoning after as many tokens as a request's thinking.budget_tokens says")
    group.add_argument("--sort-tools", action="store_true", default=None,
                       help="order tools by name, for clients that shuffle them")
    group.add_argument("--reasoning-field", metavar="content|both",
                       help="report reasoning as reasoning_content, or as reasoning too (content)")
    group.add_argument("--anthropic-usage", metavar="split|flat",
                       help="report computed prompt tokens as written to the cache, or as input (split)")
    group.add_argument("--responses-store", metavar="N",
                       help="responses that later requests may refer to by id; 0: none (256)")
    group.add_argument("--always-seal", action="store_true", default=None,
                       help="send sealed reasoning with every response, asked for or not")
    group.add_argument("--raw-reasoning-events", action="store_true", default=None,
                       help="stream the reasoning of responses as it is, beside any summary")


def _add_cache_flags(group: ArgumentParser) -> None:
    group.add_argument("--kv-rewind-points", metavar="N",
                       help="earlier lengths of a conversation that can be gone back to (16)")
    group.add_argument("--kv-disk-dir", metavar="DIR", help="keep states of conversations here (nowhere)")
    group.add_argument("--kv-disk-space-mb", metavar="N", help="most MiB that they may take (4096)")
    group.add_argument("--kv-cache-min-tokens", metavar="N", help="shortest state worth a file (512)")
    group.add_argument("--kv-cache-cold-max-tokens", metavar="N",
                       help="longest beginning of a new conversation to save; 0: none (30000)")
    group.add_argument("--kv-cache-continued-interval-tokens", metavar="N",
                       help="tokens between saves of one that grows; 0: none (10000)")
    group.add_argument("--kv-cache-boundary-trim-tokens", metavar="N", help="end of a prompt that is left out (32)")
    group.add_argument("--kv-cache-boundary-align-tokens", metavar="N", help="save at multiples of it; 0: any (2048)")
    group.add_argument("--kv-cache-reject-different-quant", action="store_true", default=None,
                       help="load no state of the same checkpoint in other quantisation")
    group.add_argument("--kv-cache-verify", metavar="full|header", help="check all of a file, or its header (full)")
    group.add_argument("--disable-exact-dsml-tool-replay", action="store_true", default=None,
                       help="render tool calls anew instead of repeating what was sampled")
    group.add_argument("--tool-memory-max-ids", metavar="N", help="tool calls that can be repeated (100000)")


def _add_log_flags(group: ArgumentParser) -> None:
    group.add_argument("--log-level", metavar="debug|info|warning|error", help="(info)")
    group.add_argument("--log-json", action="store_true", default=None,
                       help="log JSON objects, one a line: the numbers of each request, nobody's words")
    group.add_argument("--diagnostics", action="store_true", default=None,
                       help="answer POST /tokenize: the tokens of a text or of a chat request's prompt")
    group.add_argument("--trace", metavar="FILE",
                       help="write down every request in full, its answer, and what of it was reused; FILE is emptied")
    group.add_argument("--trace-format", metavar="text|jsonl", help="for people, or for ds4mlx trace (text)")
    group.add_argument("--trace-max-mb", metavar="N",
                       help="MiB after which a request begins a new file, the old one becoming FILE.1; 0: none (0)")


def run(args: Namespace) -> int:
    """Serve until a signal comes: 0. Raises what opening the model or the socket raises."""
    import asyncio

    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.serve_log import set_up
    settings = settings_from(args)
    _enter(settings.chdir)
    path = resolve_model(settings)
    set_up(settings.log_level, settings.log_json)
    with engine_lock(settings, path):
        return asyncio.run(serve(replace(settings, model=path)))


def _enter(directory: "Path | None") -> None:
    """Raises UsageError."""
    from ds4mlx.errors import UsageError
    if directory is not None:
        try:
            os.chdir(directory.expanduser())
        except OSError as fault:
            raise UsageError(f"--chdir {directory}: {fault.strerror}; give a directory that can be entered") from fault


async def serve(settings: "Settings") -> int:
    """Listen, load, wait for a signal, drain."""
    import asyncio

    from ds4mlx.cli.serve_log import teller
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.server.app import create_app
    from ds4mlx.server.listen import bind, listen, url
    from ds4mlx.service.service import open_service
    service = open_service(settings, weights_bar())
    bound = bind(settings)  # before the model: a port in use is known at once, not after minutes
    service.trace = open_trace(settings)  # after the port: a file that another server writes to is not emptied
    address = url(bound)
    told, closed = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _loading_interrupted)
    bound.listen()
    serving = asyncio.create_task(listen(create_app(service, settings), settings, bound, closed))
    tell = teller(settings.log_json)
    tell(f"loading {settings.model} ({settings.model.stat().st_size / GIB:.1f} GiB)")
    try:
        await service.start()  # until then clients are told that the model is loading
    except BaseException:
        closed.set()
        await serving
        raise
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, told)
    for line in describe(service):
        tell(line)
    print(f"listening on {address}", flush=True)
    telling = asyncio.create_task(told.wait())
    await asyncio.wait({serving, telling}, return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    await _drain(service, tell)
    closed.set()
    await serving
    return 0


async def _drain(service: "Service", tell: "Callable[[str], None]") -> None:
    """Let active requests end while the server goes on sending."""
    seconds = service.settings.drain_seconds
    if service.health.active:
        tell(f"stopping: active requests have {seconds:g} s to end; a second signal stops at once")
    await service.close(seconds)


def describe(service: "Service") -> list[str]:
    """What was loaded and how it will answer, for the person who started it."""
    from ds4mlx.server.app import is_loopback
    info, plan, settings = service.info, service.scheduler.plan, service.settings
    lines = [f"model: {info.name}, experts {info.quant}, {info.backend}, {settings.model}",
             f"context: {service.context} tokens, {_slots(plan)}",
             f"memory: weights {plan.weights_bytes / MIB:,.1f} MiB, to work in {plan.scratch_bytes / MIB:,.1f} MiB, "
             f"together {plan.total_bytes / MIB:,.1f} of at most {plan.limit_bytes / MIB:,.1f} MiB",
             f"reasoning effort: profile {service.effort_profile}, "
             f"default {', '.join(settings.default_effort) or 'by profile'}",
             _cache(service)]
    if service.trace is not None:
        lines.append(f"trace: {service.trace.path}, prompts and answers in full")
    if settings.api_key is None and not (settings.host.startswith("unix:") or is_loopback(settings.host)):
        lines.append(f"warning: {settings.host} can be reached from other machines and no --api-key is set")
    return lines


def _slots(plan: "MemoryPlan") -> str:
    each = plan.session_bytes / MIB
    if plan.sessions == 1:
        return f"1 slot of {each:,.1f} MiB"
    return f"{plan.sessions} slots of {each:,.1f} MiB, {plan.sessions * each:,.1f} MiB in all"


def _cache(service: "Service") -> str:
    store = service.scheduler.store
    if store is None:
        return "kv cache: in memory only; --kv-disk-dir DIR keeps conversations over a restart"
    stats = store.stats()
    return (f"kv cache: {store.path}, {stats.heads} states of {stats.total_bytes / MIB:,.1f} MiB, "
            f"up to {stats.budget_bytes / MIB:,.0f} MiB")


def open_trace(settings: "Settings") -> "Trace | None":
    """Raises UsageError."""
    from ds4mlx.service.trace import Trace
    if settings.trace is None:
        return None
    return Trace(settings.trace.expanduser(), settings.trace_format, settings.trace_max_mb << 20)


def _loading_interrupted() -> None:
    """The engine thread cannot be stopped while it loads; nothing is lost by leaving."""
    os._exit(130)


def _stop(told: "asyncio.Event") -> None:
    if told.is_set():
        os._exit(1)
    told.set()
