"""`ds4mlx tokens`: the ids of a text, or of a rendered conversation. Needs a vocabulary, no weights."""
import json
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds4mlx.cli.options import add_model_flags, settings_from
from ds4mlx.cli.prompt import chat_body_of_file, question
from ds4mlx.errors import UsageError
from ds4mlx.text.escaping import escaped

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from ds4mlx.text.tokenizer import Tokenizer


def add_parser(subparsers: "_SubParsersAction[ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "tokens", allow_abbrev=False, help="show the tokens of a text",
        description="First line: the ids as JSON. Then one line per token: its id and its bytes, escaped.")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", metavar="TEXT", help="the text, control tokens written as their names")
    source.add_argument("--prompt-file", metavar="FILE", help="the text in a file; - reads standard input")
    source.add_argument("--render", metavar="FILE",
                        help="a chat request in JSON, or its messages alone: print the prompt, then its ids")
    parser.add_argument("--literal", action="store_true", help="names of control tokens are ordinary text")
    add_model_flags(parser)
    group = parser.add_argument_group("rendering")
    group.add_argument("--effort-profile", metavar="auto|0731|preview",
                       help="what the checkpoint takes reasoning efforts for (auto)")
    group.add_argument("--prompt-layout", metavar="official|tools-first",
                       help="order of tools and system text (official)")
    parser.set_defaults(run=run)


def run(args: Namespace) -> int:
    """Print to standard output. Raises BadRequest for input that cannot be used, ModelFileError for the model's."""
    if args.render is not None:
        if args.literal:
            raise UsageError("--literal is for a text; a conversation that --render shows has no control tokens in it")
        lines = _rendered(args)
    else:
        from ds4mlx.cli.model import open_tokenizer
        text = question(args, "render")
        tokenizer = open_tokenizer(args)
        ids = tokenizer.encode_literal(text) if args.literal else tokenizer.encode_marked(text)
        lines = listing(tokenizer, ids)
    sys.stdout.writelines(line + "\n" for line in lines)
    return 0


def _rendered(args: Namespace) -> Iterator[str]:
    """The prompt that the server would make of a chat request, and its ids as a JSON array."""
    from ds4mlx.cli.model import resolve_model
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.server.fields import Fields
    from ds4mlx.server.openai_chat import read_chat
    from ds4mlx.service.encoding import prompt_for
    from ds4mlx.text.segments import rendered_text
    from ds4mlx.text.tokenizer import Tokenizer
    settings = settings_from(args)
    conversation = read_chat(Fields(chat_body_of_file(args.render)), settings).turn.conversation
    with GGUF.open(resolve_model(settings)) as file:
        tokenizer, prompt = Tokenizer.from_gguf(file.metadata), prompt_for(conversation, settings, file.metadata)
    yield rendered_text(prompt.segments)
    yield json.dumps(tokenizer.encode(prompt.segments))


def listing(tokenizer: "Tokenizer", ids: list[int]) -> Iterator[str]:
    """The ids as a JSON array, then a line for each: id and escaped bytes."""
    yield json.dumps(ids)
    for token in ids:
        yield f"{token:6d}  {escaped(tokenizer.token_bytes(token))}"
