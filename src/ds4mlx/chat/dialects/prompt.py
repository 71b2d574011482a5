"""What every dialect returns."""
from dataclasses import dataclass

from ds4mlx.text.segments import Segment


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation.

    `ends[i]`: all that messages 0 to i say lies in `segments[:ends[i]]`; what follows that count opens the next turn.
    `thinking`: the answer begins inside a reasoning block.
    """
    segments: tuple[Segment, ...]
    ends: tuple[int, ...]
    thinking: bool


@dataclass(frozen=True, slots=True)
class Replay:
    """A sampled tool block to repeat exactly: `lead` is the white space sampled between the content and `ids`."""
    lead: str
    ids: tuple[int, ...]
    text: str
