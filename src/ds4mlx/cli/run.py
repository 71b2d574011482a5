"""`ds4mlx run`: one question, one answer. The same path as a request to the server, without the server."""
import sys
from argparse import ArgumentParser, Namespace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.chat.messages import Json
    from ds4mlx.cli.answer import Writer
    from ds4mlx.cli.prompt_bar import PromptBar
    from ds4mlx.config import Settings
    from ds4mlx.service.service import Service
    from ds4mlx.service.answer import Answer


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    from ds4mlx.cli.options import add_engine_flags, add_sampling_flags, add_state_flags, add_thinking_flags
    from ds4mlx.cli.prompt import add_prompt_flags
    parser = subparsers.add_parser(
        "run", allow_abbrev=False, help="answer one question",
        description="The answer on standard output, everything else on standard error. What is piped in follows the "
                    "question of -p: cat file | ds4mlx run -p 'What is this?'")
    add_prompt_flags(parser)
    parser.add_argument("--messages", metavar="FILE",
                        help="a chat request in JSON, or its messages alone, instead of a prompt")
    _add_output_flags(parser.add_argument_group("output"))
    add_engine_flags(parser)
    add_sampling_flags(parser)
    parser.add_argument("--seed", metavar="N", help="the same seed, the same answer")
    parser.add_argument("--stop", metavar="S", action="append", help="end the answer before this text; repeatable")
    add_thinking_flags(parser)
    add_state_flags(parser)
    parser.set_defaults(run=run)


def _add_output_flags(group: ArgumentParser) -> None:
    group.add_argument("--format", choices=("text", "json"), default="text",
                       help="text as it comes, or one JSON object at the end (text)")
    group.add_argument("--show-thinking", dest="show_thinking", action="store_true", default=None,
                       help="reasoning too (on a terminal)")
    group.add_argument("--hide-thinking", dest="show_thinking", action="store_false", help="no reasoning (in a pipe)")
    group.add_argument("--color", choices=("auto", "always", "never"), default="auto", help="(auto)")


def run(args: Namespace) -> int:
    """0, or 130 when interrupted. Raises Ds4Error."""
    import asyncio
    import logging
    from dataclasses import replace

    from ds4mlx.cli.model import engine_lock, resolve_model
    from ds4mlx.cli.options import settings_from
    from ds4mlx.cli.prompt import chat_body, chat_body_of_file, piped_text, question
    from ds4mlx.errors import UsageError
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    settings = settings_from(args)
    text = question(args, "messages")
    if args.prompt is not None and (piped := piped_text()):
        text = f"{text}\n\n{piped}"
    if text is None and (args.raw_prompt or args.system is not None):
        raise UsageError("--messages is a whole conversation; leave out --raw-prompt and --system")
    body = chat_body_of_file(args.messages) if text is None else chat_body(text, args.system)
    settings = replace(settings, model=resolve_model(settings))
    with engine_lock(settings, settings.model):
        return asyncio.run(_run(args, settings, body, text))


async def _run(args: Namespace, settings: "Settings", body: "dict[str, Json]", text: str | None) -> int:
    """`text` is the question where --raw-prompt may apply."""
    from ds4mlx.cli.interrupt import Interrupt
    from ds4mlx.cli.prompt_bar import PromptBar
    from ds4mlx.cli.weights_bar import weights_bar
    from ds4mlx.config import color_wanted
    from ds4mlx.service.service import open_service
    service = open_service(settings, weights_bar())
    interrupt = Interrupt()
    interrupt.listen()
    bar = PromptBar(color_wanted(args.color, sys.stderr.isatty()))
    await service.start()
    try:
        answer = await _ask(args, service, body, text)
        interrupt.watch(answer)
        return await _show(answer, _writer(args, service.info.name), bar)
    finally:
        bar.close()
        await service.close(0.0)


async def _ask(args: Namespace, service: "Service", body: "dict[str, Json]", text: str | None) -> "Answer":
    from ds4mlx.server.fields import Fields
    from ds4mlx.server.openai_chat import read_chat
    settings = service.settings
    if settings.seed is not None:
        body.setdefault("seed", settings.seed)
    if args.stop:
        body["stop"] = args.stop
    turn = read_chat(Fields(body), settings).turn
    if args.raw_prompt and text is not None:
        from ds4mlx.cli.prompt import raw_ids
        return service.complete(turn, raw_ids(text, service.tokenizer))
    return await service.run(turn)


def _writer(args: Namespace, model: str) -> "Writer":
    from ds4mlx.cli.answer import JsonWriter, TextWriter
    from ds4mlx.config import color_wanted
    if args.format == "json":
        return JsonWriter(sys.stdout, model)
    terminal = sys.stdout.isatty()
    return TextWriter(sys.stdout, color=color_wanted(args.color, terminal),
                      reasoning=terminal if args.show_thinking is None else args.show_thinking)


async def _show(answer: "Answer", writer: "Writer", bar: "PromptBar") -> int:
    """Write the events to their end. Raises Ds4Error for an answer that failed, after what there is of it."""
    from ds4mlx.chat.events import Finish
    from ds4mlx.cli.answer import Speed, speed_line
    from ds4mlx.cli.interrupt import INTERRUPTED
    from ds4mlx.errors import Ds4Error
    speed = Speed()
    async for event in answer:
        speed.take(event)
        bar.take(event)
        if not isinstance(event, Finish):
            writer.write(event)
            continue
        timings = speed.numbers(event)
        writer.end(event, timings)
        print(speed_line(event, timings), file=sys.stderr)
        if event.reason == "error":
            raise Ds4Error(event.error or "the answer failed")
        return INTERRUPTED if event.reason == "cancelled" else 0
    raise AssertionError("an answer ends with Finish")
