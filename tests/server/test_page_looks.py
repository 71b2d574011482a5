"""How the page looks and is used: light and dark, 360 pixels, by keyboard alone, read out, without motion, and axe."""
import pytest
from axe_playwright_python.sync_playwright import Axe
from browser import answered, ask
from playwright.sync_api import expect

CALL = ('Look.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
RICH = ("They ask of a river.</think># A river\n\nIt says **very little**, *all day*, in `code`:\n\n- water\n- stone\n"
        "\n> quoted\n\n```python\nprint('a line that is too long for a narrow window: it scrolls in a box' * 3)\n```\n"
        "\n| a | b |\n|---|---|\n| c | d |\n\n" + "unbroken" * 40)
ANSWERS = {"river": RICH, "Oslo?": CALL, "long": "Hidden thought. " * 9 + "</think>" + "A sentence of it. " * 120,
           "night": "</think>Nobody talks. It is dark!"}
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 360, "height": 640}


@pytest.fixture(scope="module")
def talker(start_server, stop_server, script_of):
    server = start_server(script=script_of(ANSWERS), settings={"ctx": 16384, "batched_session": 2}, step_s=0.001)
    yield server
    stop_server(server)


def full(page):
    """All that there is to see: options, tools, reasoning, every kind of block, reasons."""
    page.get_by_role("button", name="Options").click()
    page.get_by_role("button", name="Offer a demo tool").click()
    ask(page, "What does the river say?")
    answered(page, "A river")
    page.locator(".thought summary").click()
    ask(page, "How is the weather in Oslo?")
    expect(page.get_by_role("button", name="Send the result")).to_be_visible()
    expect(page.locator("#late .request").nth(1)).to_contain_text("this tab")


def findings(page):
    """What axe finds, in both sets of colours."""
    found = []
    for colours in ("light", "dark"):
        page.emulate_media(color_scheme=colours)
        for rule in Axe().run(page).response["violations"]:
            found += [(colours, rule["id"], rule["impact"], node["html"][:120]) for node in rule["nodes"]]
    return found


@pytest.mark.parametrize("window", [WIDE, NARROW], ids=["wide", "narrow"])
def test_axe_finds_nothing(tabs, talker, window):
    page = tabs.open(talker.url, viewport=window, bypass_csp=True)      # axe is a script of others
    full(page)
    assert findings(page) == []
    if window is NARROW:
        page.get_by_role("button", name="Server", exact=True).click()
        assert findings(page) == []


def test_axe_finds_nothing_on_an_empty_page_and_in_the_question_for_the_key(tabs, serve):
    page = tabs.open(serve(settings={"api_key": "k"}).url, bypass_csp=True)
    expect(page.get_by_label("API key")).to_be_focused()
    assert findings(page) == []
    page.get_by_label("API key").fill("k")
    page.keyboard.press("Enter")
    expect(page.locator("#status")).to_have_text("ready")
    assert findings(page) == []


def test_at_360_pixels_nothing_sticks_out_and_both_halves_are_reached(tabs, talker):
    page = tabs.open(talker.url, viewport=NARROW)
    full(page)
    width = "() => Math.max(document.documentElement.scrollWidth, document.querySelector('#scroll').scrollWidth)"
    assert page.evaluate(width) <= 360
    expect(page.locator("#server")).to_be_hidden()
    page.get_by_role("button", name="Server", exact=True).click()
    expect(page.locator("#slots .slot")).to_have_count(2)
    assert page.evaluate("() => document.querySelector('#server').scrollWidth") <= 360
    expect(page.locator("#chat")).to_be_hidden()


def background(page):
    return page.evaluate("() => getComputedStyle(document.body).backgroundColor")


def test_colours_follow_the_system_until_they_are_chosen_and_then_stay(tabs, talker):
    page = tabs.open(talker.url, color_scheme="light")
    light = background(page)
    page.emulate_media(color_scheme="dark")
    dark = background(page)
    assert light != dark
    page.get_by_role("button", name="Colours: as the system has them").click()
    expect(page.get_by_role("button", name="Colours: light")).to_be_visible()
    assert background(page) == light
    page.reload()
    assert background(page) == light
    page.get_by_role("button", name="Colours: light").click()
    page.emulate_media(color_scheme="light")
    assert background(page) == dark


def go_to(page, text, key):
    """Press `key` until what is focused has this text."""
    for _ in range(60):
        page.keyboard.press(key)
        if page.evaluate("() => document.activeElement.textContent") == text:
            return
    raise AssertionError(f"{text} was not reached by {key}")


def test_a_conversation_by_keyboard_alone(tabs, talker):
    page = tabs.open(talker.url)
    page.keyboard.type("What does the river say?")
    page.keyboard.press("Enter")
    answered(page, "A river")
    go_to(page, "Thought", "Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_text("They ask of a river.")).to_be_visible()
    go_to(page, "Retry", "Tab")
    page.keyboard.press("Enter")
    answered(page, "A river")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_escape_stops_and_the_arrow_changes_the_last_message(tabs, talker):
    page = tabs.open(talker.url)
    page.keyboard.type("Something long")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.model")).to_contain_text("A sentence of it.")
    page.keyboard.press("Escape")
    expect(page.locator(".note")).to_have_text("Stopped.")
    page.keyboard.press("ArrowUp")
    page.keyboard.type("And at night?")
    page.keyboard.press("Enter")
    answered(page, "Nobody talks.")
    assert page.locator(".said").all_text_contents() == ["And at night?"]


def test_everything_that_can_be_pressed_is_reached_by_tab(tabs, talker):
    page = tabs.open(talker.url)
    full(page)
    kinds = "button, textarea, input, select, summary"
    wanted = page.locator(f":is({kinds}):visible:not(:disabled)").count()
    page.evaluate("() => document.activeElement.blur()")
    reached = set()
    for _ in range(wanted + 40):
        page.keyboard.press("Tab")
        reached.add(page.evaluate(
            "kinds => [...document.querySelectorAll(kinds)].indexOf(document.activeElement)", kinds))
    assert len(reached - {-1}) == wanted


def test_whole_sentences_are_read_out_seldom_and_the_reasoning_never(tabs, talker):
    page = tabs.open(talker.url, before="""addEventListener('DOMContentLoaded', () => { window.heard = [];
        const hear = changes => changes.forEach(({addedNodes: [node]}) => node && heard.push(node.textContent));
        new MutationObserver(hear).observe(document.querySelector('#told'), {childList: true}); })""")
    ask(page, "And at night?")
    answered(page, "Nobody talks.")
    assert page.evaluate("() => heard") == ["The answer is on its way.", "Nobody talks. It is dark!"]
    ask(page, "Something long")
    answered(page, "A sentence of it.")
    heard = page.evaluate("() => heard")[2:]
    assert len(heard) <= 6 and not any("Hidden thought" in said for said in heard)
    assert all(said.endswith((".", "page.")) for said in heard)


def test_nothing_moves_where_motion_is_unwanted(tabs, talker):
    moving = "() => document.getAnimations().length"
    for reduced, moves in (("no-preference", True), ("reduce", False)):
        page = tabs.open(talker.url, reduced_motion=reduced)
        ask(page, "Something long")
        expect(page.locator(".stage")).to_be_visible()
        assert (page.evaluate(moving) > 0) is moves
        page.keyboard.press("Escape")
