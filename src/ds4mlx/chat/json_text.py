"""JSON text that comes out as it went in: key order and number spelling kept, spacing as the model was trained on."""
import json

from ds4mlx.chat.messages import Json


class Number(float):
    """A number that remembers its spelling: `1e3` stays `1e3`, and a 20-digit integer keeps all digits."""
    __slots__ = ("spelling",)
    spelling: str

    def __new__(cls, spelling: str) -> "Number":
        number = super().__new__(cls, spelling)
        number.spelling = spelling
        return number


def parse(text: str) -> Json:
    """JSON text -> value, every number a Number. Raises ValueError; RecursionError when nested too deep."""
    value: Json = json.loads(text, parse_float=Number, parse_int=Number, parse_constant=_refuse)
    return value


def spell(value: Json) -> str:
    """Value -> JSON on one line, `", "` and `": "` between, non-ASCII as it is. RecursionError when nested too deep."""
    if isinstance(value, Number):
        return value.spelling
    if isinstance(value, dict):
        return "{" + ", ".join([f"{spell(key)}: {spell(item)}" for key, item in value.items()]) + "}"
    if isinstance(value, list):
        return "[" + ", ".join([spell(item) for item in value]) + "]"
    return json.dumps(value, ensure_ascii=False)


def _refuse(constant: str) -> Json:
    raise ValueError(f"{constant} is not JSON")
