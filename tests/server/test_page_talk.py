"""The page as one talks on it: a conversation, tools, stop, retry, edit, and text that means no good."""
import json
import re

import pytest
from browser import answered, ask
from playwright.sync_api import expect
from waiting import idle, until

CALL = ('Look.</think>\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" '
        'string="true">Oslo</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>')
ANSWERS = {
    "river": "They ask of a river.</think>It says **very little**:\n\n- water\n- stone\n\n"
             "```python\nprint('sea')\n```\n",
    "night": "</think>The same, and *nobody* talks.",
    "Oslo?": CALL,
    "light rain": "</think>It rains in Oslo.",
    "long": "</think>" + "A sentence of it. " * 400,
    "sentence": "|on it goes",      # behind a part of that
}


@pytest.fixture(scope="module")
def talker(start_server, stop_server, script_of):
    server = start_server(script=script_of(ANSWERS), settings={"ctx": 16384}, step_s=0.001)
    yield server
    stop_server(server)


@pytest.fixture
def page(tabs, talker):
    return tabs.open(talker.url)


def last(page):
    return page.locator(".turn.model").last


def test_a_conversation_with_its_reasoning_folded_and_its_markdown_shown(page):
    ask(page, "What does the river say?")
    answered(page, "It says very little")
    thought = last(page).locator(".thought")
    expect(thought.locator("p")).to_be_hidden()
    thought.locator("summary").click()
    expect(thought.locator("p")).to_have_text("They ask of a river.")
    assert last(page).locator(".flow strong").text_content() == "very little"
    assert last(page).locator(".flow li").all_text_contents() == ["water", "stone"]
    assert last(page).locator(".flow pre").text_content() == "print('sea')"


def test_the_second_answer_says_what_it_reused_and_from_where(page):
    ask(page, "What does the river say?" * 10)
    answered(page, "very little")
    ask(page, "And at night?")
    answered(page, "nobody talks")
    expect(last(page).locator("footer .kept")).to_contain_text("from memory")
    told = last(page).locator("footer").text_content()
    prompt, reused = map(int, re.search(r"prompt (\d+), (\d+) from memory", told).groups())
    assert 250 < reused < prompt


def test_a_tool_is_offered_called_and_answered_by_hand(page):
    page.get_by_role("button", name="Options").click()
    page.get_by_role("button", name="Offer a demo tool").click()
    expect(page.get_by_text("Offered: get_weather")).to_be_visible()
    ask(page, "How is the weather in Oslo?")
    call = page.get_by_role("region", name="Call of get_weather")
    expect(call.get_by_label("Its result")).to_have_value('{"city":"Oslo","temperature":17,"sky":"light rain"}')
    assert json.loads(call.get_by_label("Arguments").text_content()) == {"city": "Oslo"}
    page.get_by_role("button", name="Send the result").click()
    answered(page, "It rains in Oslo.")
    expect(page.get_by_role("button", name="Send the result")).to_have_count(0)


def test_a_suggestion_brings_the_tool_that_it_needs(page):
    page.get_by_role("button", name="by a demo tool").click()
    expect(page.get_by_role("region", name="Call of get_weather")).to_be_visible()
    assert page.locator(".turn.user .said").all_text_contents() == ["What is the weather in Oslo?"]


def test_tools_that_are_none_are_said_to_be_and_not_sent(page):
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Tools, as JSON").fill('[{"name": ""}]')
    expect(page.get_by_text("Not sent: tool 1 has no name")).to_be_visible()
    page.get_by_label("Tools, as JSON").fill('{"name": "bash", "input_schema": {"type": "object"}}')
    expect(page.get_by_text("Offered: bash")).to_be_visible()


def test_stop_ends_it_here_and_on_the_server_and_it_can_go_on(page, talker):
    ask(page, "Something long")
    expect(last(page)).to_contain_text("A sentence of it.")
    page.get_by_role("button", name="Stop").click()
    expect(last(page).locator(".note")).to_have_text("Stopped.")
    until(lambda: idle(talker))
    had = last(page).locator(".flow").text_content()
    last(page).get_by_role("button", name="Continue").click()
    expect(last(page).locator(".flow")).to_have_text(f"{had}|on it goes")


def test_the_last_answer_is_tried_again_and_the_last_message_changed(page):
    ask(page, "And at night?")
    answered(page, "nobody talks")
    last(page).get_by_role("button", name="Retry").click()
    answered(page, "nobody talks")
    expect(page.locator(".turn")).to_have_count(2)
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Message", exact=True)).to_have_value("And at night?")
    ask(page, "And the river?")
    answered(page, "very little")
    assert page.locator(".turn.user .said").all_text_contents() == ["And the river?"]


def test_a_limit_is_told_and_an_answer_goes_on_behind_it(page):
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Most tokens").fill("20")
    ask(page, "Something long")
    expect(last(page).locator(".note")).to_have_text("Cut at the most tokens that were allowed.")
    expect(last(page).locator(".flow")).to_have_text("A sentence of it. A")
    page.get_by_label("Most tokens").fill("")
    last(page).get_by_role("button", name="Continue").click()
    expect(last(page).locator(".flow")).to_have_text("A sentence of it. A|on it goes")


def test_what_the_server_refuses_is_shown_in_its_words(page):
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Temperature").fill("7")
    ask(page, "And at night?")
    expect(last(page).locator(".note")).to_contain_text("The server says: temperature")


# ---- text that means no good

HOSTILE = """<img src=x onerror="alert(1)"><script>alert(2)</script> **<b>bold</b>** `<i>` [x](javascript:alert(3))

# <svg onload=alert(4)>

```<style>*{display:none}</style>
</pre></figure><script>alert(5)</script>
```

| <a href="javascript:alert(6)">a</a> | b |
|---|---|
| ![](http://elsewhere.example/x.png) | \u202ereversed\u202c |
"""


def recalled(*texts):
    """Ahead of the page: the tab remembers an answer of each of these texts, with the same in its other parts."""
    turns = []
    for text in texts:
        call = {"id": text, "name": text, "args": text, "result": text}
        turns += [{"role": "user", "text": text},
                  {"role": "assistant", "text": text, "thought": text, "calls": [call], "state": "done", "note": text}]
    talk = {"turns": turns, "draft": "", "fields": {}}
    return f"sessionStorage.setItem('ds4mlx.talk', {json.dumps(json.dumps(talk))})"


def test_no_text_becomes_html(tabs, talker):
    page = tabs.open(talker.url, before=recalled(HOSTILE))
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: asked.append(dialog.message))
    turns = page.locator("#turns")
    assert turns.locator("img, script, style, svg, a, iframe, object, form").count() == 0
    assert "<script>alert(2)</script>" in turns.inner_text() and "<svg onload=alert(4)>" in turns.inner_text()
    assert turns.locator(".flow strong").text_content() == "<b>bold</b>"
    expect(page.locator("#facts")).to_contain_text("running")      # it works on, and has asked nobody else
    assert {url.removeprefix(talker.url) for url in asked} <= {"/stats", "/admin/requests", "/v1/models"}


@pytest.mark.parametrize("text", [
    "**a `b " * 14_000, "_a_b " * 20_000, "> " * 50_000, "- " * 50_000, "|\n|" + "-" * 100_000 + "x",
    "a|b\n-|-\n" + "|" * 140_000, "|" * 140_000 + "\n|-"])
def test_endless_repetition_leaves_the_page_usable(tabs, talker, text):
    page = tabs.open(talker.url, before=recalled(text))
    page.get_by_role("button", name="New conversation").click()
    ask(page, "And at night?")
    answered(page, "nobody talks")


MARKDOWN = {
    "a **b": "a **b", "2 * 3 * 4": "2 * 3 * 4", "snake_case_name": "snake_case_name", "``a`b``": "a`b",
    "\\*not\\*": "*not*", "***both***": "both", "1. one\n2. two": "onetwo", "<b>": "<b>", "a\nb": "a\nb",
    "> quoted\n> still": "quoted\nstill", "```\nopen": "open", "- a\n\n  b\n- c": "abc", "# Title": "Title",
    "before\n- list": "beforelist", "|a|b|\n|-|-|\n|c|d|": "abcd", "|a|b|\n|-|-|\n|c|d|e|": "abcd|e",
    "~~~\n```\n~~~": "```"}


def test_markdown_reads_as_one_expects(tabs, talker):
    page = tabs.open(talker.url, before=recalled(*MARKDOWN))
    page.evaluate("() => document.querySelectorAll('figcaption').forEach(node => node.remove())")
    assert page.locator(".flow").all_text_contents() == list(MARKDOWN.values())


IN_PIECES = """# Rivers

1. One item

   of two paragraphs
2. and code in the next:

   ```python
   a = 1

b = 2
   ```

Between, *a line
over two*.

- ~~~
  x

y
  ~~~

> a quote

| a | b |
|---|---|
| c | d |

```
one

- two

three
```

The end."""


def test_text_that_comes_in_pieces_looks_like_text_that_comes_at_once(tabs, serve):
    page = tabs.open(serve(f"</think>{IN_PIECES}", step_s=0.002).url)
    ask(page, "Rivers?")
    answered(page, "The end.")
    whole = tabs.open(page.url, before=recalled(IN_PIECES))
    flow = "() => document.querySelector('.flow').innerHTML"
    assert page.evaluate(flow) == whole.evaluate(flow)
