"""What a text must be like: checks of one key each, all of which must hold."""
import json
import re
from collections.abc import Callable, Mapping

from ds4mlx.chat.messages import Json

Check = Callable[[str, Json], bool]


def _between(count: int, wanted: Json) -> bool:
    low, high = wanted if isinstance(wanted, list) else (wanted, wanted)
    return low <= count <= high


def _json(text: str, wanted: Json) -> bool:
    """Whether it is JSON, and nothing else, of this value."""
    try:
        return json.loads(text) == wanted
    except (ValueError, RecursionError):
        return False


CHECKS: dict[str, Check] = {
    "equals": lambda text, wanted: text == wanted,
    "contains": lambda text, wanted: str(wanted) in text,
    "lacks": lambda text, wanted: str(wanted).lower() not in text.lower(),
    "matches": lambda text, wanted: re.fullmatch(str(wanted), text, re.DOTALL) is not None,
    "begins": lambda text, wanted: text.startswith(str(wanted)),
    "ends": lambda text, wanted: text.endswith(str(wanted)),
    "words": lambda text, wanted: _between(len(text.split()), wanted),
    "lines": lambda text, wanted: _between(len([line for line in text.splitlines() if line.strip()]), wanted),
    "lower": lambda text, wanted: (text == text.lower()) == wanted,
    "upper": lambda text, wanted: (text == text.upper()) == wanted,
    "json": _json,
}


def failed(text: str, checks: tuple[dict[str, Json], ...]) -> list[str]:
    """Those that do not hold of the text without the blanks around it, as JSON."""
    text = text.strip()
    return [json.dumps(check, ensure_ascii=False) for check in checks
            if not all(CHECKS[name](text, wanted) for name, wanted in check.items())]


def known_check(check: Mapping[str, Json]) -> str | None:
    """What is wrong with a check; None where it can be made."""
    if len(check) != 1 or not check.keys() <= CHECKS.keys():
        return f"a check of {', '.join(map(repr, check)) or 'nothing'}, need one of {', '.join(CHECKS)}"
    (name, wanted), = check.items()
    numbers = wanted if isinstance(wanted, list) else [wanted, wanted]
    if name in ("words", "lines") and (len(numbers) != 2 or not all(type(n) is int for n in numbers)):
        return f"{name} is {wanted!r}, need a number or two"
    if name == "matches":
        try:
            re.compile(str(wanted))
        except re.error as fault:
            return f"{str(wanted)[:60]!r} is no regular expression ({fault})"
    return None
