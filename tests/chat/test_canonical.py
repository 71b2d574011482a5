"""Client noise that must not reach the prompt."""
import time

import pytest

from ds4mlx.chat.canonical import canonical, clean_text, drop_billing
from ds4mlx.chat.messages import Conversation, Message, TextPart

BILLING = "x-anthropic-billing-header: cc_version=2.1.332.a3f; nonce=1"


def test_lone_surrogates_become_replacement_characters():
    assert clean_text("a\ud800b\udfff") == "a\ufffdb\ufffd"
    assert clean_text("pairs 😀 and ￿ stay") == "pairs 😀 and ￿ stay"


@pytest.mark.parametrize("text, left", [
    (BILLING, ""), ("x-anthropic-other: 1", ""), ("You help.", "You help."), ("", ""),
    (f"{BILLING}\nYou help.", "You help."), (f"You help.\n{BILLING}", "You help."), (f"A\n{BILLING}\n", "A\n"),
    (f"{BILLING}\n{BILLING}\nA\n{BILLING}\n{BILLING}", "A"),
    (f"a\n{BILLING}\nb", f"a\n{BILLING}\nb"), (f"quoted: {BILLING}", f"quoted: {BILLING}")])
def test_billing_lines_vanish_from_both_ends_only(text, left):
    assert drop_billing(text) == left


def test_many_billing_lines_in_the_middle_take_linear_time():
    """Under 10 ms; trying each line as the first of the last ones took half a minute."""
    text = "A" + f"\n{BILLING}" * 10_000 + "\nb"
    start = time.process_time()
    assert drop_billing(text) == text
    assert time.process_time() - start < 5


def test_only_system_messages_lose_their_billing_parts():
    system = Message("system", (TextPart(BILLING), TextPart("You help.")))
    user = Message("user", (TextPart(BILLING),))
    cleaned = canonical(Conversation((system, user)))
    assert cleaned.messages == (Message("system", (TextPart("You help."),)), user)
