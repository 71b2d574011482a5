"""GET / is a page for browsers: one file that needs nothing else, and may do nothing else."""
import re
from base64 import b64encode
from hashlib import sha256

import pytest
from starlette.testclient import TestClient

from ds4mlx.config import Settings
from ds4mlx.engine.stub import StubEngine
from ds4mlx.server.app import create_app
from ds4mlx.service.service import Service

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


@pytest.fixture(scope="module")
def page(server):
    return server.client.get("/", headers=BROWSER)


@pytest.mark.parametrize("accept, kind", [
    (BROWSER["accept"], "text/html; charset=utf-8"), ("*/*", "text/html; charset=utf-8"),
    ("application/json", "application/json"), ("text/html, application/json", "text/html; charset=utf-8")])
def test_people_get_the_page_and_programs_that_ask_for_json_a_name(server, accept, kind):
    answer, head = (ask("/", headers={"accept": accept}) for ask in (server.client.get, server.client.head))
    assert answer.status_code == head.status_code == 200
    assert answer.headers["content-type"] == head.headers["content-type"] == kind and head.content == b""
    assert "ds4mlx" in answer.text


def test_a_browser_may_run_only_what_is_in_the_file(page):
    policy = dict(part.split(" ", 1) for part in page.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for kind in ("script", "style"):
        inline, = re.findall(rf"<{kind}\b[^>]*>(.*?)</{kind}>", page.text, re.DOTALL)
        assert policy[f"{kind}-src"] == f"'sha256-{b64encode(sha256(inline.encode()).digest()).decode()}'"
    assert policy["trusted-types"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"


def test_nothing_in_it_leads_elsewhere(page):
    addresses = set(re.findall(r"https?://[^\s'\"`<>]+", page.text))
    assert addresses == {"http://www.w3.org/2000/svg"}      # a name that nobody asks for
    assert not re.search(r'<(?:script|img|iframe)\b[^>]*\bsrc=|@import|url\(|<link rel="(?!icon)', page.text)


def test_text_is_never_made_into_html(page):
    ways = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(|new Function|\bon\w+=\""
    assert not re.search(ways, page.text)


def test_the_page_itself_needs_no_key_and_all_that_it_shows_does(serve):
    client = serve(settings={"api_key": "k"}).client
    assert client.get("/", headers=BROWSER).status_code == 200
    assert {client.get(path).status_code for path in ("/stats", "/admin/requests", "/v1/models")} == {401}
    assert client.post("/v1/chat/completions", json={}).status_code == 401


def test_the_page_is_there_while_the_model_loads(tokenizer):
    loading = Service(StubEngine, tokenizer, Settings())
    with TestClient(create_app(loading, Settings()), base_url="http://localhost") as client:
        assert "<title>ds4mlx</title>" in client.get("/", headers=BROWSER).text


def test_a_page_elsewhere_cannot_frame_it_or_learn_where_one_comes_from(page):
    assert page.headers["referrer-policy"] == "no-referrer" and page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["vary"] == "accept" and page.headers["cache-control"] == "no-cache"
