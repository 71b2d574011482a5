"""Events cross from the engine thread to the loop in order, joined, with few wake-ups and bounded memory."""
import asyncio
import threading

from ds4mlx.chat.events import Finish, Progress, ReasoningDelta, TextDelta, ToolArgsDelta, Usage
from ds4mlx.service.mailbox import LIMIT_BYTES, Mailbox, joined

END = Finish("stop", Usage(1, 0, 1, 0))


def received(put):
    """The batches that a reader takes while `put(mailbox)` runs on another thread, up to Finish."""
    async def read():
        mailbox, batches = Mailbox(asyncio.get_running_loop()), []
        thread = threading.Thread(target=put, args=(mailbox,))
        thread.start()
        while not batches or batches[-1][-1] != END:
            batches.append(await mailbox.take())
        thread.join()
        return batches

    return asyncio.run(read())


def test_neighbouring_deltas_of_one_kind_are_joined():
    assert joined([TextDelta("a"), TextDelta("b"), ReasoningDelta("c"), ReasoningDelta("d"), ToolArgsDelta(0, "{"),
                   ToolArgsDelta(0, "}"), ToolArgsDelta(1, "{")]) == [
        TextDelta("ab"), ReasoningDelta("cd"), ToolArgsDelta(0, "{}"), ToolArgsDelta(1, "{")]


def test_ten_thousand_tokens_need_few_wake_ups_and_lose_nothing():
    def put(mailbox):
        for i in range(10_000):
            mailbox.put([TextDelta(f"{i} ")])
        mailbox.put([END], last=True)

    batches = received(put)
    text = "".join(event.text for batch in batches for event in batch if isinstance(event, TextDelta))
    assert text == "".join(f"{i} " for i in range(10_000))
    assert len(batches) < 1000  # at 10 ms each that is 10 s of putting, which takes milliseconds


def test_the_first_events_do_not_wait_for_more():
    seen = threading.Event()

    async def read():
        mailbox = Mailbox(asyncio.get_running_loop())
        threading.Thread(target=lambda: mailbox.put([Progress(1, 2)])).start()
        assert await mailbox.take() == [Progress(1, 2)]
        seen.set()

    asyncio.run(asyncio.wait_for(read(), 10))
    assert seen.is_set()


def test_events_within_the_wake_up_interval_arrive_without_another_put():
    async def read():
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put([TextDelta("a")])
        await mailbox.take()
        mailbox.put([TextDelta("b")])  # too soon for a wake-up of its own
        return await mailbox.take()

    assert asyncio.run(asyncio.wait_for(read(), 10)) == [TextDelta("b")]


def test_a_mailbox_is_full_until_it_is_emptied():
    async def fill():
        mailbox = Mailbox(asyncio.get_running_loop())
        mailbox.put([TextDelta("x" * LIMIT_BYTES)])
        assert mailbox.full
        await mailbox.take()
        assert not mailbox.full

    asyncio.run(fill())


def test_a_closed_loop_takes_nothing_and_breaks_nothing():
    async def make():
        return Mailbox(asyncio.get_running_loop())

    asyncio.run(make()).put([END], last=True)
