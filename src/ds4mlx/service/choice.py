"""Which idle slot a request takes. A pure decision over lengths in tokens; busy slots are no choice at all.

What a slot holds can be shared with any other, so taking a slot costs what is then no longer in memory, and nothing
else. In order, the first that applies:

1. a slot whose whole state the request continues: the longest
2. a slot of the same client's conversation that keeps most of its state: the longest
3. an empty slot, unless another one loses next to nothing by the request
4. the slot with the fewest tokens that are then neither in memory nor on disk; but after all others, one that holds
   a main thread: a conversation in use that is much longer than the prompt, or longer than all others and the prompt

Ties go to the slot that was used longest ago.
"""
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ds4mlx.sessions.policy import GAIN

SHELTERED_S = 900.0     # a main thread waits that long for its subagents


@dataclass(frozen=True, slots=True)
class Seat:
    """An idle slot as a request sees it. live: tokens that it holds; reuse: of them, that the request goes on from.

    continues: the request goes on from all of them. hinted: its client's last request there named the same
    conversation. used_at: seconds of some clock.
    """
    slot: int
    live: int = 0
    reuse: int = 0
    continues: bool = False
    hinted: bool = False
    used_at: float = 0.0


def choose(seats: Sequence[Seat], prompt: int, now: float, on_disk: Callable[[int], int]) -> int:
    """The slot for a prompt of so many tokens. on_disk: how many tokens of a slot's state are on disk, asked when it
    matters."""
    def longest(found: Sequence[Seat]) -> int:
        return min(found, key=lambda seat: (-seat.reuse, seat.used_at)).slot

    if whole := [seat for seat in seats if seat.continues]:
        return longest(whole)
    if own := [seat for seat in seats if seat.hinted and seat.reuse >= GAIN and seat.reuse >= seat.live - seat.reuse]:
        return longest(own)
    if empty := [seat for seat in seats if not seat.live]:
        return longest([seat for seat in seats if seat.reuse >= GAIN >= seat.live - seat.reuse] or empty)

    in_use = [seat for seat in seats if now - seat.used_at < SHELTERED_S and seat.live - seat.reuse > GAIN]
    sheltered = {seat.slot for seat in in_use if seat.live > 2 * prompt}
    sheltered |= {seat.slot for seat in sorted(in_use, key=lambda seat: seat.live)[-1:] if seat.live > prompt}

    def price(seat: Seat) -> tuple[bool, int, float]:
        return seat.slot in sheltered, seat.live - max(seat.reuse, on_disk(seat.slot)), seat.used_at

    return min(seats, key=price).slot
