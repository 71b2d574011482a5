"""Sampled tool blocks are found again by the ids of their calls, and only by them."""
import re

import pytest

from ds4mlx.sessions.replay import Call, Replays, ToolMemory, cut_block, new_call_id
from ds4mlx.sessions.toolmap import ToolBlock
from ds4mlx.text.segments import DSML, Control

TWO = ToolBlock(("call_a", "call_b"), "", "\n\n<two>", (271, 30, 128825, 7))
TWO_CALLS = (("bash", '{"command": "ls"}'), ("read", '{"path": "x", "lines": 5.0}'))
A, B = (Call(call_id, *call) for call_id, call in zip(TWO.call_ids, TWO_CALLS))
ONE = ToolBlock(("call_c",), "\n", "<one>", (30, 128825, 8))
C = Call("call_c", "bash", "{}")


def memory(**limits):
    made = ToolMemory(**limits)
    made.remember(TWO, TWO_CALLS)
    made.remember(ONE, [("bash", "{}")])
    return made


def test_ids_cannot_be_guessed():
    made = {new_call_id("call_") for _ in range(1000)} | {new_call_id("toolu_") for _ in range(1000)}
    assert len(made) == 2000 and all(re.fullmatch("(call|toolu)_[0-9a-f]{32}", call_id) for call_id in made)


def test_messages_repeat_the_blocks_of_their_ids():
    assert memory().replays({1: [A, B], 3: [C], 5: []}) == Replays({1: TWO, 3: ONE}, mem=2)


def test_a_block_is_repeated_however_its_arguments_were_respelled():
    returned = Call("call_b", "read", '{"all":true,"lines":5,"path":"x"}')
    schemas = {"read": {"properties": {"all": {"default": True}}}, "bash": {}}
    assert memory().replays({0: [A, returned]}, schemas).blocks == {0: TWO}
    assert memory().replays({0: [A, returned]}, {"bash": schemas["read"]}).blocks == {}


NOT_THE_BLOCK = {
    "an edited argument": [A, Call("call_b", "read", '{"path": "y", "lines": 5}')],
    "another tool": [A, Call("call_b", "write", B.arguments)],
    "calls of another order": [B, A], "one call dropped": [A], "a call twice": [A, B, B],
    "calls of two blocks": [A, C], "an unknown id among them": [A, Call("call_z", *TWO_CALLS[1])],
    "no ids": [Call("", *call) for call in TWO_CALLS],
}


@pytest.mark.parametrize("calls", NOT_THE_BLOCK.values(), ids=NOT_THE_BLOCK)
def test_a_message_that_is_not_the_sampled_one_is_rendered_as_it_is(calls):
    replays = memory().replays({4: calls})
    assert replays.blocks == {} and (replays.mem, replays.disk, replays.canonical) == (0, 0, 1)


def test_ids_that_nobody_knows_are_counted():
    strangers = [Call("call_x", "bash", "{}"), Call("", "bash", "{}")]
    assert memory().replays({0: [C], 2: [A, *strangers]}) == Replays({0: ONE}, mem=1, canonical=1, missing_ids=2)


def test_the_least_recently_used_block_goes_as_a_whole():
    kept = memory(max_ids=3)
    kept.replays({0: [A, B]})  # used after ONE
    kept.remember(ToolBlock(("call_d",), "", "<d>", (9,)), [("bash", "{}")])
    assert kept.replays({0: [A, B], 1: [C]}) == Replays({0: TWO}, mem=1, canonical=1, missing_ids=1)
    kept.remember(ToolBlock(("call_e", "call_f"), "", "<e>", (9,)), TWO_CALLS)
    assert kept.replays({0: [A, B]}).missing_ids == 2 and kept.ids == 2


def test_text_is_bounded_as_well_as_ids():
    kept = ToolMemory(max_bytes=10_000)
    for i in range(100):
        kept.remember(ToolBlock((f"call_{i}",), "", "x" * 900, (1, 2)), [("bash", "{}")])
        assert kept.bytes <= 10_000
    assert kept.ids == 10  # of 914 bytes each
    kept.remember(ToolBlock(("call_big",), "", "中" * 4000, (1,)), [("bash", "{}")])
    assert kept.ids == 10 and kept.replays({0: [Call("call_big", "bash", "{}")]}).missing_ids == 1


def test_without_room_nothing_is_kept_nor_read_from_disk():
    off = ToolMemory(max_ids=0, on_disk={"call_c": ONE}.get, read_calls=lambda block: [("bash", "{}")])
    off.remember(ONE, [("bash", "{}")])
    assert off.replays({0: [C]}) == Replays(canonical=1, missing_ids=1)


def test_a_block_remembered_again_takes_no_more_room():
    kept = memory()
    room = kept.ids, kept.bytes
    kept.remember(ONE, [("bash", "{}")])
    assert (kept.ids, kept.bytes) == room and kept.replays({0: [C]}).blocks == {0: ONE}


def test_a_block_saved_before_a_restart_is_read_once():
    reads = []
    saved = {"call_a": TWO, "call_b": TWO}
    after = ToolMemory(on_disk=lambda call_id: reads.append(call_id) or saved.get(call_id),
                       read_calls=lambda block: TWO_CALLS)
    assert after.replays({0: [A, B]}) == Replays({0: TWO}, disk=1)
    assert after.replays({0: [A, B]}) == Replays({0: TWO}, mem=1) and reads == ["call_a"]


SAVED_WRONG = {"of another id": (ONE, [("bash", "{}")]), "with other calls": (TWO, [("bash", "{}")]),
               "with other arguments": (TWO, [("bash", "{}"), ("read", "{}")]),
               "that names an id twice": (ToolBlock(("call_a", "call_a"), "", "", (1,)), TWO_CALLS)}


@pytest.mark.parametrize("block, calls", SAVED_WRONG.values(), ids=SAVED_WRONG)
def test_a_saved_block_is_not_repeated_when_it_is_one(block, calls):
    kept = ToolMemory(max_ids=2, on_disk=lambda call_id: block, read_calls=lambda block: calls)
    assert kept.replays({0: [A, B]}).blocks == {}
    kept.remember(TWO, TWO_CALLS)
    assert kept.replays({0: [A, B]}).blocks == {0: TWO} and kept.ids == 2


def test_a_saved_block_of_another_id_leaves_the_id_unknown():
    after = ToolMemory(on_disk=lambda call_id: TWO, read_calls=lambda block: TWO_CALLS)
    assert after.replays({0: [C]}) == Replays(canonical=1, missing_ids=1) and after.ids == 0


def test_a_state_is_saved_with_the_blocks_that_it_holds_as_sampled():
    kept = memory()
    history = [0, 5, *TWO.ids, 1, 6, 30, 128825]  # the second block was rendered from a client's words
    assert kept.blocks_in(["call_b", "call_a", "call_c", "call_z"], history) == (TWO,)
    assert kept.blocks_in(["call_c", "call_a"], [*ONE.ids, *TWO.ids]) == (ONE, TWO)
    assert kept.blocks_in(["call_a", "call_c"], [*ONE.ids, *TWO.ids]) == (TWO, ONE)
    assert kept.blocks_in([], history) == () == kept.blocks_in(["call_a"], [])


def test_a_block_between_two_tokens_is_not_in_a_history():
    kept = ToolMemory()
    kept.remember(ToolBlock(("call_s",), "", "s", (0x00020001,)), [("bash", "{}")])
    assert kept.blocks_in(["call_s"], [0x00010000, 0x00000002]) == ()
    assert kept.blocks_in(["call_s"], [0x00010000, 0x00000002, 0x00020001]) != ()


MARK = (128825, Control(DSML))
REST = [(70, b"tool"), (71, b"_calls"), (72, b">"), (73, b"\n</"), MARK, (74, b"tool_calls"), (75, b">\n")]
CUTS = {
    "a separator of its own": ([(1, b"Hi"), (271, b"\n\n"), (30, b"<")], "", 1),
    "a half-merged separator": ([(1, b"Hi"), (339, b".\n\n"), (30, b"<")], "\n\n", 2),
    "a separator merged by half": ([(1, b"Hi"), (340, b".\n"), (201, b"\n"), (30, b"<")], "\n", 2),
    "content that ends in spaces": ([(1, b"Hi"), (2, b"  "), (271, b"\n\n"), (30, b"<")], "", 1),
    "spaces merged with content": ([(1, b"Hi. "), (271, b"\n\n"), (30, b"<")], " ", 1),
    "a bracket merged with content": ([(1, b"(Hi"), (9, b")<")], "<", 2),
    "no content": ([(271, b"\n\n"), (30, b"<")], "", 0), "neither content nor separator": ([(30, b"<")], "", 0),
    "a quoted block before it": ([(1, f"<{DSML}tool_calls>".encode()), (30, b"<")], "", 1),
    "half a character": ([(1, b"\xe4\xb8"), (2, b"\xad\n"), (30, b"<")], "\n", 2),
    "a stray mark": ([MARK, (1, b"x"), (30, b"<")], "", 2),
}


@pytest.mark.parametrize("before, lead, first", CUTS.values(), ids=CUTS)
def test_a_block_begins_with_the_first_whole_token_after_the_content(before, lead, first):
    answer = [*before, MARK, *REST]
    assert cut_block(answer) == (lead, tuple(token for token, _ in answer[first:]))


@pytest.mark.parametrize("answer", [[], [(1, b"Hi")], [MARK], [(30, b"<"), MARK, (1, b"invoke")],
                                    [(1, f"<{DSML}tool_calls>".encode())]])
def test_an_answer_without_a_block_has_none_to_cut(answer):
    assert cut_block(answer) is None
