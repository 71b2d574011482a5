"""The log of `ds4mlx serve` on standard error: text for people, or one JSON object a line for programs."""
import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

log = logging.getLogger("ds4mlx.serve")


def set_up(level: str, as_json: bool) -> None:
    """Send every log record of this process to standard error."""
    if as_json:
        handler: logging.Handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        logging.basicConfig(level=level.upper(), handlers=[handler])
        logging.captureWarnings(True)
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.logging import RichHandler
        handler = RichHandler(console=Console(stderr=True), show_path=False)
        logging.basicConfig(level=level.upper(), format="%(message)s", handlers=[handler])
    else:
        logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")


def teller(as_json: bool) -> Callable[[str], None]:
    """Tells who started the server what it does: on standard error, in the log where that is JSON."""
    return log.info if as_json else lambda line: print(line, file=sys.stderr, flush=True)


class JsonLines(logging.Formatter):
    """A record as one JSON object, in which arguments of ours that have names are members.

    No prompt gets in, and no key. Our records hold neither. Of a library's the first line is kept: asyncio's go on with
    the repr of what failed, and Hypercorn's have all headers among their arguments. Of an exception there is its type
    and where it was raised, but not its text, which may quote a prompt.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        ours = record.name.partition(".")[0] == "ds4mlx"
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(), "logger": record.name,
            "message": message if ours else message.partition("\n")[0]}
        if ours and isinstance(record.args, Mapping):
            line |= record.args
        if record.exc_info and record.exc_info[0] is not None:
            kind, _, raised = record.exc_info
            line |= {"exception": kind.__name__,
                     "where": [f"{at.filename}:{at.lineno} {at.name}" for at in traceback.extract_tb(raised)]}
        return json.dumps(line, ensure_ascii=False, default=str)
