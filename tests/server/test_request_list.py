"""GET /admin/requests tells of each request what it went on from, and why from no more."""
import pytest
from waiting import idle, until

LONG = "a long question " * 50


def listed(server):
    return server.client.get("/admin/requests").json()


def ended(server):
    until(lambda: idle(server))
    return listed(server)["ended"]


def test_a_request_that_ended_is_told_of_with_its_figures(serve):
    server = serve()
    id = server.post(json={"messages": [{"role": "user", "content": LONG}], "thinking": False}).headers["x-request-id"]
    told, = ended(server)
    assert (told["id"], told["api"], told["stage"], told["finish"]) == (id, "chat", "ended", "stop")
    assert (told["slot"], told["place"], told["tokens"]) == (0, 0, len("Hello."))
    assert told["prefilled"] == told["prompt_tokens"] > len(LONG) and 0 <= told["ago_s"] < 60


def test_it_says_from_where_a_prompt_went_on_and_where_it_parted(serve):
    server = serve()
    server.chat(LONG + "one"), server.chat(LONG + "two")
    second, first = ended(server)
    assert (first["reused"]["kept"], first["reused"]["reason"]) == ("nothing", "no-live-checkpoint")
    assert (second["reused"]["source"], second["reused"]["reason"]) == ("none", "token-mismatch")
    assert "its text in messages[0] at byte" in second["reused"]["because"]


@pytest.mark.parametrize("slots, kept, other", [(1, "memory", None), (2, "shared", 0)])
def test_it_says_whose_state_was_gone_on_from(serve, slots, kept, other):
    server = serve(settings={"batched_session": slots})
    system = {"role": "system", "content": LONG * 3}
    for question in ("one " * 200, "two " * 200):
        server.post(json={"messages": [system, {"role": "user", "content": question}], "thinking": False})
    reused = ended(server)[0]["reused"]
    assert (reused["kept"], reused["slot"]) == (kept, other) and reused["tokens"] > len(LONG)


def test_a_state_from_disk_is_told_as_such(serve, tmp_path):
    settings = {"kv_disk_dir": tmp_path / "kv", "ctx": 8192}
    server = serve(settings=settings)
    server.chat(LONG * 4), server.chat("another one"), server.service.scheduler.store.flush()
    server.chat(LONG * 4)
    assert [told["reused"]["kept"] for told in ended(server)] == ["disk", "nothing", "nothing"]


def test_what_runs_is_told_with_its_stage(serve, connect):
    server = serve("word " * 500, step_s=0.005)
    for _ in range(2):
        connect(server, stream=True)
        until(lambda: server.service.health.active == 1)
    until(lambda: [told["stage"] for told in listed(server)["requests"]] == ["decoding", "waiting"])
    running, waiting = listed(server)["requests"]
    assert running["reused"]["kept"] == "nothing" and waiting["reused"] is waiting["slot"] is None
    until(lambda: listed(server)["requests"][0]["decode_tps"] > 0)


def test_the_latest_come_first_and_the_old_are_forgotten(serve):
    server = serve()
    ids = [server.post(json={"messages": [{"role": "user", "content": "Hi"}], "thinking": False}).headers[
        "x-request-id"] for _ in range(45)]
    assert [told["id"] for told in ended(server)] == ids[:4:-1]


def test_nobodys_words_are_in_the_list(serve):
    server = serve("answer-zebra")
    server.chat("prompt-zebra " * 20, model="model-zebra", user="user-zebra", session_id="zebra",
                tools=[{"type": "function", "function": {"name": "tool_zebra"}}])
    server.chat("zebra-prompt " * 20)
    until(lambda: idle(server))
    assert "zebra" not in server.client.get("/admin/requests").text
