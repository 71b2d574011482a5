"""The live half of the page: slots and what they hold, who runs and waits, what each went on from and why no more."""
import re
import threading

import pytest
from browser import ask
from playwright.sync_api import expect
from waiting import idle, read_until, until

from ds4mlx.engine.stub import Gate

LONG = "a long question " * 60


@pytest.fixture
def watch(tabs, serve):
    """watch(**settings): a server and a page that watches it."""
    def opened(answer="Hello.", *, step_s=0.0, **settings):
        server = serve(answer, settings={"ctx": 8192, **settings}, step_s=step_s)
        return server, tabs.open(server.url)

    return opened


def ask_of(server, system, question):
    server.post(json={"messages": [{"role": "system", "content": system}, {"role": "user", "content": question}],
                      "thinking": False})


def test_those_who_wait_are_shown_with_their_place_and_can_be_cancelled(watch, connect):
    server, page = watch()
    server.stub.before_prefill = Gate()
    streams = []
    for number in range(3):
        streams.append(connect(server, stream=True))
        until(lambda: len(server.service.scheduler.requests) == number + 1)
    expect(page.locator("#now .request b")).to_have_text(["reads", "place 1", "place 2"])
    page.locator("#now .request").nth(1).get_by_role("button").click()
    expect(page.locator("#now .request b")).to_have_text(["reads", "place 1"])
    assert b'"code":"cancelled"' in read_until(streams[1], b"[DONE]")
    server.stub.before_prefill.opened.set()
    expect(page.get_by_text("Nobody asks anything.")).to_be_visible()


def test_a_prompt_that_was_computed_anew_says_why(watch):
    server, page = watch()
    server.chat(LONG + "one"), server.chat("Another thing. " + LONG)
    latest = page.locator("#late .request").first
    expect(latest).to_contain_text("The prompt parts from the live state at token")
    expect(latest).to_contain_text("its text in messages[0] at byte")
    expect(latest.locator(".kept")).to_have_attribute("data-kept", "nothing")


@pytest.mark.parametrize("slots, kept, words", [
    (1, "memory", "from memory, gone back"), (2, "shared", "shared with slot 0")])
def test_what_a_prompt_went_on_from_is_named_and_drawn(watch, slots, kept, words):
    server, page = watch(batched_session=slots)
    ask_of(server, LONG * 3, "one " * 200), ask_of(server, LONG * 3, "two " * 200)
    label = page.locator("#late .request").first.locator(".kept")
    expect(label).to_contain_text(words)
    expect(label).to_have_attribute("data-kept", kept)
    slot = page.locator("#slots .slot").last
    expect(slot.locator(".bar i").first).to_have_attribute("data-kept", kept)
    expect(slot.get_by_role("img")).to_have_attribute("aria-label", _holds(kept))


def _holds(kept):
    named = {"memory": "from memory", "shared": "from another slot"}[kept]
    return re.compile(rf"Slot \d: [\d,]+ {named}, [\d,]+ computed, \d+ written")


def test_a_state_from_disk_is_named_and_its_directory_counted(watch, tmp_path):
    server, page = watch(kv_disk_dir=tmp_path / "kv")
    server.chat(LONG * 4), server.chat("Another thing."), server.service.scheduler.store.flush()
    server.chat(LONG * 4)
    expect(page.locator("#late .request").first.locator(".kept")).to_contain_text("from disk")
    expect(page.locator("#facts")).to_contain_text("kB of 4.3 GB, 1 hit")


def test_speed_is_shown_while_it_lasts(watch):
    server, page = watch("word " * 4000, step_s=0.002)
    asking = threading.Thread(target=server.chat, args=("Hi",), kwargs={"max_tokens": 4000})
    asking.start()
    written = page.locator(".rate.gen b")
    expect(written).not_to_have_text("0.0")
    expect(page.locator("#now .request")).to_contain_text("/s")
    expect(page.locator("#slots .slot").first).to_contain_text("writes")
    page.locator("#now .request").get_by_role("button").click()
    asking.join(60)
    until(lambda: idle(server))
    expect(written).to_have_text("0.0")


def test_what_is_focused_stays_focused_while_the_figures_change(watch, connect):
    server, page = watch("word " * 4000, step_s=0.002)
    connect(server, stream=True)
    cancel = page.locator("#now .request").get_by_role("button")
    cancel.focus()
    before = page.locator("#now .request").text_content()
    expect(page.locator("#now .request")).not_to_have_text(before)
    expect(cancel).to_be_focused()


def test_a_long_prompt_is_followed_as_it_is_read(watch):
    server, page = watch(prefill_chunk=64)
    waits = threading.Event()
    server.stub.before_prefill = lambda: waits.wait(0.1)
    ask(page, LONG * 2)
    expect(page.locator(".stage")).to_contain_text("of 1,9")
    expect(page.locator("#now .request b")).to_have_text("reads")
    waits.set()
