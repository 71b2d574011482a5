"""Tools with random strict schemas, whose values are short enough to come to an end by chance."""
from ds4mlx.chat.messages import Tool

ODD = ("", "a", "it's", "x < y", "</b>", "a & b", "&lt;", "&amp;amp;", 'say "hi"', "two\nlines", "\u4e2d\u6587",
       "\U0001f600", "\\n", "{}", "true", "\t", "<tool_calls>")
LEAVES = ("string", "string", "short", "enum", "enum", "integer", "number", "between", "quarters", "boolean", "null",
          "const", "pattern", "date", "nullable", "ref")
POINT = {"type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"],
         "additionalProperties": False}
NESTED = ("array", "object", "anyOf")


def random_tool(rng, name="run"):
    names = rng.sample(["path", "old string", "n", "limit", "mode", "x&y", "items", "a.b", '"q"'], rng.randint(0, 5))
    schema = {"type": "object", "properties": {name: random_schema(rng, 2) for name in names},
              "required": [name for name in names if rng.random() < 0.5], "additionalProperties": False,
              "$defs": {"point": POINT}}
    return Tool(name, {"name": name, "parameters": schema}, strict=True)


def random_schema(rng, depth):
    kind = rng.choice(LEAVES + NESTED if depth else LEAVES)
    low = rng.randint(-50, 50)
    match kind:
        case "array":
            return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": rng.randint(0, 1),
                    "maxItems": 3}
        case "object":
            inner = {key: random_schema(rng, depth - 1) for key in rng.sample(["k", "l\u00e4nge", "a b", "z"], 2)}
            return {"type": "object", "properties": inner, "required": [*inner][:rng.randint(0, 2)],
                    "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth - 1) for _ in range(2)], "description": "either"}
    return {"string": {"type": "string", "maxLength": rng.randint(0, 12), "description": "text"},
            "short": {"type": "string", "minLength": 2, "maxLength": 4},
            "enum": {"enum": rng.sample([*ODD, 1, 2.5, None, True], rng.randint(1, 5))},
            "integer": {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)},
            "number": {"type": "number"}, "between": {"type": "number", "minimum": low, "exclusiveMaximum": low + 10},
            "quarters": {"type": "number", "minimum": low, "maximum": low + 10, "multipleOf": 0.25},
            "boolean": {"type": "boolean"}, "null": {"type": "null"}, "const": {"const": rng.choice(ODD)},
            "pattern": {"type": "string", "pattern": "^[a-c]{2,5}$"}, "date": {"type": "string", "format": "date"},
            "nullable": {"type": ["string", "null"], "maxLength": 5}, "ref": {"$ref": "#/$defs/point"}}[kind]
