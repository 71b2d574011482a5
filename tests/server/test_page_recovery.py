"""What the page does when something breaks: it was loaded again, the server went away, a key is asked for."""
import pytest
from browser import answered, ask
from cuttable import Line
from playwright.sync_api import expect
from waiting import idle, until

ANSWERS = {"long": "</think>" + "A sentence of it. " * 400, "sentence": "|on it goes", "thinks": "It thinks on. " * 400}


@pytest.fixture(scope="module")
def start_talker(start_server, stop_server, script_of):
    servers = []

    def start():
        settings = {"ctx": 16384, "drain_seconds": 0}
        servers.append(start_server(script=script_of(ANSWERS), settings=settings, step_s=0.001))
        return servers[-1]

    yield start
    for server in servers:
        stop_server(server)


@pytest.fixture(scope="module")
def talker(start_talker):
    return start_talker()


@pytest.fixture
def line(talker):
    made = Line(talker)
    yield made
    made.cut()


def last(page):
    return page.locator(".turn.model").last


def test_a_page_loaded_again_says_what_became_of_the_answer_and_goes_on(tabs, talker):
    page = tabs.open(talker.url)
    ask(page, "Something long")
    expect(last(page)).to_contain_text("A sentence of it.")
    page.reload()
    expect(last(page).locator(".note")).to_contain_text("The page was loaded again while this was being written")
    until(lambda: idle(talker))
    had = last(page).locator(".flow").text_content()
    assert had.startswith("A sentence of it.")
    last(page).get_by_role("button", name="Continue").click()
    expect(last(page).locator(".flow")).to_have_text(f"{had}|on it goes")


def test_what_was_typed_and_chosen_is_there_after_a_reload(tabs, talker):
    page = tabs.open(talker.url)
    page.get_by_role("button", name="Options").click()
    page.get_by_label("System text").fill("Be brief.")
    page.get_by_label("Reasoning").select_option("off")
    page.get_by_label("Message", exact=True).fill("Half a quest")
    page.reload()
    expect(page.get_by_label("Message", exact=True)).to_have_value("Half a quest")
    page.get_by_role("button", name="Options").click()
    expect(page.get_by_label("System text")).to_have_value("Be brief.")
    expect(page.get_by_label("Reasoning")).to_have_value("off")


def test_a_server_that_was_started_again_is_found_and_the_answer_goes_on(tabs, line, start_talker):
    page = tabs.open(line.url)
    ask(page, "Something long")
    expect(last(page)).to_contain_text("A sentence of it.")
    line.cut()
    expect(last(page).locator(".note")).to_contain_text("The connection to the server was lost")
    expect(page.locator("#status")).to_have_text("no answer, trying again")
    had = last(page).locator(".flow").text_content()
    line.mend(start_talker())
    expect(page.locator("#status")).to_have_text("ready", timeout=60_000)
    expect(last(page).locator(".note")).to_contain_text("It was started again.")
    last(page).get_by_role("button", name="Continue").click()
    expect(last(page).locator(".flow")).to_have_text(f"{had}|on it goes")


def test_live_figures_go_on_by_themselves(tabs, line, talker):
    page = tabs.open(line.url)
    expect(page.locator("#status")).to_have_text("ready")
    line.cut()
    expect(page.locator("#status")).to_have_text("no answer, trying again")
    line.mend(talker)
    talker.chat("Something long", max_tokens=5)
    expect(page.locator("#late .request").first).to_contain_text("5 written", timeout=60_000)
    expect(page.locator("#status")).to_have_text("ready")


def test_reasoning_that_was_cut_off_can_only_be_tried_again(tabs, line, talker):
    page = tabs.open(line.url)
    ask(page, "What it thinks")
    expect(last(page).locator(".thought p")).to_contain_text("It thinks on.")
    line.cut()
    expect(last(page).locator(".note")).to_be_visible()
    expect(last(page).get_by_role("button", name="Continue")).to_have_count(0)
    line.mend(talker)
    last(page).get_by_role("button", name="Retry").click()
    expect(last(page).locator(".thought.busy")).to_be_visible()
    page.keyboard.press("Escape")


# ---- the key

@pytest.fixture(scope="module")
def locked(start_server, stop_server):
    server = start_server("</think>Come in.", settings={"api_key": "sesame"})
    yield server
    stop_server(server)


def give(page, key):
    page.get_by_label("API key").fill(key)
    page.keyboard.press("Enter")


def test_the_key_is_asked_for_and_kept_for_the_tab_alone(tabs, locked):
    page = tabs.open(locked.url)
    expect(page.get_by_role("dialog", name="This server asks for its key")).to_be_visible()
    give(page, "tahini")
    expect(page.get_by_text("That is not the key.")).to_be_visible()
    give(page, "sesame")
    expect(page.locator("#status")).to_have_text("ready")
    page.reload()
    ask(page, "May I?")
    answered(page, "Come in.")
    assert page.evaluate("() => [sessionStorage['ds4mlx.key'], JSON.stringify(localStorage)]") == ["sesame", "{}"]


def test_a_question_asked_without_the_key_is_asked_again_with_it(tabs, locked):
    page = tabs.open(locked.url)
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.press("Escape")
    ask(page, "May I?")
    give(page, "sesame")
    answered(page, "Come in.")
    expect(page.locator(".turn")).to_have_count(2)


def test_a_key_that_is_given_while_a_question_is_on_its_way_answers_it(tabs, locked):
    page, held = tabs.open(locked.url), []
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.press("Escape")
    page.route("**/v1/chat/completions", lambda route: held.append(route), times=1)
    ask(page, "May I?")
    expect(page.locator(".turn.model").last).to_contain_text("Asking")
    page.evaluate("() => document.querySelector('#key').showModal()")   # as any other request's refusal does
    give(page, "sesame")
    expect(page.get_by_label("API key")).to_be_hidden()
    [request] = held
    request.continue_()
    answered(page, "Come in.")
    expect(page.get_by_label("API key")).to_be_hidden()


def test_a_key_that_is_forgotten_is_asked_for_again(tabs, locked):
    page = tabs.open(locked.url)
    give(page, "sesame")
    expect(page.locator("#status")).to_have_text("ready")
    page.get_by_role("button", name="Options").click()
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_label("API key")).to_be_visible()
    assert page.evaluate("() => sessionStorage['ds4mlx.key']") is None
