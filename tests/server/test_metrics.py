"""GET /stats and GET /metrics: what they count, and that they hold nobody's text."""
import re
import threading

import pytest
from starlette.testclient import TestClient

from ds4mlx.config import Settings
from ds4mlx.engine.protocol import MemoryUse
from ds4mlx.engine.stub import Gate, StubEngine
from ds4mlx.server.app import create_app
from ds4mlx.service.service import Service

SAMPLE = re.compile(r'ds4mlx_[a-z_]+(?:\{[a-z]+="[^"{}]*"(?:,[a-z]+="[^"{}]*")*\})? -?[0-9.e+-]+')


def stats(server):
    return server.client.get("/stats").json()


def samples(server):
    """Name with labels -> value, of /metrics."""
    lines = server.client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def test_requests_are_counted_by_api_and_end(serve):
    server = serve()
    server.chat()
    server.chat(max_tokens=1)
    server.post("/v1/completions", json={"prompt": "Hi", "thinking": False})
    assert stats(server)["requests"] == {"chat": {"stop": 1, "length": 1}, "completions": {"stop": 1}}
    assert samples(server)['ds4mlx_requests_total{api="chat",finish="length"}'] == 1


def test_tokens_are_counted_by_where_they_came_from(serve):
    server = serve("plan</think>Done.")
    first, again = (server.chat("long " * 60, thinking=True)["usage"] for _ in range(2))
    tokens, counted = stats(server)["tokens"], samples(server)
    assert again["prompt_tokens_details"]["cached_tokens"] == again["prompt_tokens"] == first["prompt_tokens"]
    assert tokens["prompt"] == {"none": 0, "prefill": first["prompt_tokens"], "memory-rewind": again["prompt_tokens"]}
    assert (tokens["generated"], tokens["reasoning"]) == (20, 10)
    assert counted['ds4mlx_cache_decisions_total{source="memory-rewind"}'] == 1
    assert counted["ds4mlx_generated_tokens_total"] == 20


def test_every_phase_is_timed(serve):
    server = serve()
    server.chat()
    server.chat(max_tokens=0)   # has no first token
    counted = samples(server)
    assert [counted[f"ds4mlx_{phase}_seconds_count"] for phase in ("request", "queue", "ttft")] == [2, 2, 1]
    assert counted["ds4mlx_prefill_tokens_per_second"] > 0 < counted["ds4mlx_decode_tokens_per_second"]
    assert counted["ds4mlx_request_seconds_sum"] >= counted["ds4mlx_ttft_seconds_sum"] > 0


def test_histograms_are_cumulative_up_to_their_count(serve):
    server = serve()
    server.chat()
    text = server.client.get("/metrics").text
    buckets = [int(n) for n in re.findall(r'ds4mlx_request_seconds_bucket\{le="[0-9.]+"\} (\d+)', text)]
    assert buckets == sorted(buckets) and len(buckets) == 10
    assert 'ds4mlx_request_seconds_bucket{le="+Inf"} 1\n' in text and "ds4mlx_request_seconds_count 1\n" in text


def test_what_waits_and_what_is_computed_is_shown(serve):
    server, gate = serve(), Gate()
    server.stub.before_prefill = gate
    asking = [threading.Thread(target=server.chat) for _ in range(2)]
    asking[0].start()
    assert gate.reached.wait(60)
    asking[1].start()
    while not stats(server)["queued"]:
        pass
    counted = samples(server)
    assert (counted["ds4mlx_active_requests"], counted["ds4mlx_queue_depth"]) == (1, 1)
    gate.opened.set()
    for thread in asking:
        thread.join(60)
    while stats(server)["active"]:  # the answer is out before its end is kept
        pass
    assert stats(server)["queued"] == 0


def test_errors_are_counted_by_status(serve):
    server = serve()
    server.stub.before_decode = lambda: 1 / 0
    assert server.post(json={"messages": []}).status_code == 400
    assert server.post(json={"messages": [{"role": "user", "content": "Hi"}]}).status_code == 500
    assert stats(server)["errors"] == {"400": 1, "500": 1} and stats(server)["requests"]["chat"] == {"error": 1}
    assert samples(server)['ds4mlx_http_errors_total{status="400"}'] == 1


def test_tool_blocks_that_became_text_are_counted(serve):
    server = serve("Look: <｜DSML｜tool_calls>\n<｜DSML｜invoke na")
    answer = server.chat(tools=[{"type": "function", "function": {"name": "bash"}}], max_tokens=24)
    assert answer["choices"][0]["message"]["content"].startswith("Look: <")
    assert stats(server)["recovered_tool_blocks"] == samples(server)["ds4mlx_dsml_recovered_total"] == 1


def test_states_on_disk_are_counted(serve, tmp_path):
    server = serve(settings={"kv_disk_dir": tmp_path / "kv", "ctx": 16384})
    server.chat("a system text " * 100)
    store = server.service.scheduler.store
    store.flush()
    server.chat("another " * 200)
    store.flush()
    kept, counted, health = stats(server)["kv_cache"], samples(server), server.client.get("/health").json()["kv_cache"]
    assert kept["enabled"] and kept["heads"] >= 1 and kept["saved"] >= 1
    assert counted["ds4mlx_kv_disk_bytes"] == kept["total_bytes"] == health["bytes"] > 0
    assert counted['ds4mlx_kv_disk_files{kind="state"}'] + counted['ds4mlx_kv_disk_files{kind="segment"}'] == (
        health["files"])


def test_hits_misses_and_evictions_of_the_disk_are_counted_by_what_they_were(serve, tmp_path):
    server = serve("plan</think>Done.", settings={"kv_disk_dir": tmp_path / "kv", "kv_disk_space_mb": 1, "ctx": 16384})
    question = {"role": "user", "content": "the first " * 200}
    answer = server.post(json={"messages": [question]}).json()["choices"][0]["message"]["content"]
    server.chat("another one"), server.service.scheduler.store.flush()
    server.post(json={"messages": [question, {"role": "assistant", "content": answer},   # without its reasoning
                                   {"role": "user", "content": "And?"}]})
    for number in range(40):    # a state of one takes some 50 kB, the directory 1 MiB
        server.chat(f"another {number} " * 800)
        server.service.scheduler.store.flush()
    counted = samples(server)
    assert counted['ds4mlx_kv_disk_hits_total{kind="thinking-visible"}'] == 1
    assert counted['ds4mlx_kv_disk_misses_total{reason="no-candidate"}'] == 42
    assert counted['ds4mlx_kv_disk_evictions_total{reason="disk-cache-full"}'] > 10
    kept = stats(server)["kv_cache"]
    assert sum(kept["hits_by_key"].values()) == kept["hits"] > 0


def test_the_engines_memory_is_told(serve, monkeypatch):
    server = serve()
    # Given, for the engine's own grows between two pages: it goes on with the end of an answer after its client has it.
    monkeypatch.setattr(server.stub, "memory", lambda: MemoryUse(4096, 8192))
    counted, memory = samples(server), stats(server)["memory"]
    assert counted["ds4mlx_mlx_active_bytes"] == memory["active_bytes"] == 4096
    assert counted["ds4mlx_mlx_peak_bytes"] == memory["peak_bytes"] == 8192


def test_without_a_cache_there_is_nothing_to_count(server):
    assert stats(server)["kv_cache"] == {"enabled": False} == {"enabled": server.client.get("/health").json()[
        "kv_cache"]["enabled"]}
    assert "kv_disk" not in server.client.get("/metrics").text


def test_the_text_is_what_prometheus_reads(server):
    server.chat()
    answer = server.client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = []
    for line in answer.text.splitlines():
        if line.startswith("# TYPE "):
            families.append(line.split()[2])
        elif not line.startswith("# HELP "):
            assert SAMPLE.fullmatch(line) and line.startswith(families[-1]), line
    assert len(set(families)) == len(families) and answer.text.endswith("\n")


@pytest.mark.parametrize("path", ["/stats", "/metrics"])
def test_nothing_that_a_client_wrote_is_told(serve, path):
    server = serve("answer-zebra")
    server.chat("prompt-zebra", model="model-zebra", user="user-zebra", stop="stop-zebra",
                tools=[{"type": "function", "function": {"name": "tool_zebra"}}])
    server.client.get("/path-zebra")
    assert "zebra" not in server.client.get(path).text


@pytest.mark.parametrize("protect, status", [(False, 200), (True, 401)])
def test_a_key_is_needed_for_stats_and_for_metrics_when_protected(serve, protect, status):
    server = serve(settings={"api_key": "k", "protect_metrics": protect})
    assert (server.client.get("/stats").status_code, server.client.get("/metrics").status_code) == (401, status)
    key = {"x-api-key": "k"}
    assert {server.client.get(path, headers=key).status_code for path in ("/stats", "/metrics")} == {200}


def test_metrics_can_be_read_while_the_model_loads(tokenizer):
    loading = Service(StubEngine, tokenizer, Settings())
    with TestClient(create_app(loading, Settings()), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code == 200
