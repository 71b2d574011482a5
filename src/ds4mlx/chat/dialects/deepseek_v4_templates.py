"""The fixed texts of DeepSeek V4 prompts, byte for byte what the model was trained on.

Source: the encoder published with the model. Control literals inside these texts are control tokens; what is filled in
(schemas, results) is untrusted and stays text.
"""
from collections.abc import Iterable
from typing import Literal

from ds4mlx.chat.json_text import spell
from ds4mlx.chat.messages import Effort, Json
from ds4mlx.text.segments import Segment, Text, split_controls

EffortProfile = Literal["0731", "preview"]

_THOROUGH = """\
Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.

"""

_EXHAUSTIVE = """\
Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.
You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the \
problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying cause \
rather than any surface symptom.
Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no \
assumption remains unchecked and no error remains undiscovered.

"""

# The 0731 checkpoint has each text one level lower; low has none in either.
EFFORT_TEXT: dict[EffortProfile, dict[Effort, str]] = {
    "preview": {"low": "", "high": "", "max": _THOROUGH},
    "0731": {"low": "", "high": _THOROUGH, "max": _EXHAUSTIVE},
}

_TOOLS_HEAD = """\
## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜tool_calls>" block like the following:

<｜DSML｜tool_calls>
<｜DSML｜invoke name="$TOOL_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$TOOL_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""

_TOOLS_TAIL = """

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_FORMAT_HEAD = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


def tools_block(schemas: Iterable[dict[str, Json]]) -> list[Segment]:
    """The tools section of a system message, one schema a line."""
    return [*split_controls(_TOOLS_HEAD), Text("\n".join(map(spell, schemas))), Text(_TOOLS_TAIL)]


def format_block(response_format: dict[str, Json]) -> list[Segment]:
    """The response-format section of a system message."""
    return [Text(_FORMAT_HEAD), Text(spell(response_format))]


def result_block(content: str) -> list[Segment]:
    """One tool result. Of its content only the closing tag is altered."""
    return [Text("<tool_result>"), Text(content.replace("</tool_result>", "&lt;/tool_result>")), Text("</tool_result>")]
