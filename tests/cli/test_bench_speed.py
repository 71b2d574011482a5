"""`ds4mlx bench`: speed at growing contexts. Not the times are tested, but what is counted, kept and said."""
import csv
import io
import json
import os
import re
import resource
import signal
import sys

import pexpect
import pytest

from ds4mlx.cli.bench_measure import Frontier, Sweep, frontiers, measure
from ds4mlx.cli.bench_plot import plot
from ds4mlx.cli.bench_record import COLUMNS, CsvFile, read_csv
from ds4mlx.engine.stub import StubEngine
from ds4mlx.errors import Ds4Error

HEADER = ("ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,gen_first_ms,gen_steady_tokens,gen_steady_tps,"
          "kvcache_bytes")
SMALL = ("--ctx-start", "64", "--ctx-max", "192", "--step-incr", "64", "--gen-tokens", "4", "--warmup", "16")


@pytest.fixture
def bench(ds4mlx, tiny_path, tmp_path):
    """bench(*arguments): on the scripted engine and a text of some thousand tokens, unless they name another."""
    (tmp_path / "text.txt").write_text("The river carries stones down to the valley. " * 300)
    return lambda *arguments: ds4mlx("bench", "-m", tiny_path, "--engine", "stub", "--prompt-file", "text.txt",
                                     *arguments)


def rows(text):
    return list(csv.DictReader(io.StringIO(text)))


def row(ctx=64, prefill_tps=100.0, gen_tps=10.0, prefill_tokens=64):
    return Frontier(ctx, prefill_tokens, prefill_tps, 4, gen_tps, 1.0, 3, gen_tps, 1000)


def measured(engine, *marks, **how):
    return list(measure(engine, list(range(100)), Sweep(marks, 200, **{"gen_tokens": 3, "warmup": 0} | how), engine.eos,
                        chunk=16))


def test_frontiers_grow_by_a_step_or_a_factor_and_end_at_the_last():
    assert frontiers(10, 30, 10, 1) == (10, 20, 30) and frontiers(10, 25, 10, 1) == (10, 20, 25)
    assert frontiers(3, 20, 0, 1.5) == (3, 5, 8, 12, 18, 20) and frontiers(1, 4, 0, 1.01) == (1, 2, 3, 4)


def test_only_the_added_interval_is_computed_and_the_probe_leaves_nothing_behind():
    engine = StubEngine(lambda prompt: [2, 3, 4, 5])
    assert [found.row.prefill_tokens for found in measured(engine, 20, 50)] == [20, 30]
    assert engine.slices == [16, 4, 16, 14]     # chunks of 16


def test_a_repeated_interval_is_computed_again():
    engine = StubEngine()
    found = measured(engine, 20, 30, repeat=3)
    assert engine.slices == [16, 4] * 3 + [10] * 3 and [len(f.runs) for f in found] == [3, 3]
    speeds = sorted(run.prefill_tps for run in found[0].runs)
    assert found[0].row.prefill_tps == speeds[1]


def test_the_probe_never_takes_the_end_of_the_answer():
    fed = []
    engine = StubEngine(lambda prompt: [])      # whose answer is its end, again and again
    decode = engine.decode
    engine.decode = lambda batch: fed.extend(r.token for r in batch) or decode(batch)
    assert measured(engine, 20)[0].row.gen_tokens == 3 and len(fed) == 3 and engine.eos not in fed


def test_several_sessions_decode_together_from_one_prefill_each_its_own_way():
    fed = []
    engine = StubEngine()
    decode = engine.decode
    engine.decode = lambda batch: fed.append([r.token for r in batch]) or decode(batch)
    found, = measured(engine, 20, concurrency=4)
    assert engine.slices == [16, 4] and [len(batch) for batch in fed] == [4] * 3
    assert len(set(fed[0])) == 4 and found.row.gen_tokens == 12


def test_a_forced_probe_is_fed_the_text():
    fed = []
    engine = StubEngine()
    decode = engine.decode
    engine.decode = lambda batch: fed.extend(r.token for r in batch) or decode(batch)
    measured(engine, 20, teacher_forced=True)
    assert fed == [20, 21, 22]      # the text is its own positions


def test_the_csv_has_its_header_and_a_row_a_frontier(bench):
    result = bench(*SMALL)
    assert result.code == 0 and result.out.splitlines()[0] == HEADER == ",".join(COLUMNS)
    found = rows(result.out)
    assert [(r["ctx_tokens"], r["prefill_tokens"], r["gen_tokens"], r["gen_steady_tokens"]) for r in found] == [
        ("64", "64", "4", "3"), ("128", "64", "4", "3"), ("192", "64", "4", "3")]
    assert all(float(r["prefill_tps"]) > 0 and float(r["gen_tps"]) > 0 for r in found)


def test_the_real_engine_goes_through_the_same_protocol(ds4mlx, tiny_path, bench, tmp_path):
    result = ds4mlx("bench", "-m", tiny_path, "--chat-prompt-file", "text.txt", *SMALL, "--concurrency", "2", "--json",
                    "out.json", "--bandwidth-gb-s", "100", "--dump-frontier-logits-dir", "logits")
    report = json.loads((tmp_path / "out.json").read_text())
    assert result.code == 0 and report["rows"][2]["gen_tokens"] == 8
    assert len(report["bandwidth_limit"]["tps"]) == 3 and report["machine"]["mlx"] and report["model"]["fingerprint"]
    logits = json.loads((tmp_path / "logits" / "frontier_128.logits.json").read_text())
    assert logits["prompt_tokens"] == 128 and len(logits["logits"]) == logits["vocab"] == 4096


def test_the_state_is_as_large_as_the_engine_says(bench):
    found = rows(bench(*SMALL, "--gen-tokens", "0").out)
    tokens, logits = 4, 4 * 4096        # bytes of a token's id; a float a token of the vocabulary
    assert [int(r["kvcache_bytes"]) for r in found] == [tokens * n + logits for n in (64, 128, 192)]
    assert all((r["gen_tokens"], r["gen_tps"]) == ("0", "0.00") for r in found)


@pytest.mark.parametrize("arguments, told", [
    (["--ctx-start", "9", "--ctx-max", "8"], "--ctx-start"), (["--step-mul", "0.5"], "--step-mul"),
    (["--step-incr", "0"], "--step-incr"), (["--ctx-alloc", "32896"], "--ctx-alloc"), (["--repeat", "0"], "--repeat"),
    (["--concurrency", "17"], "--concurrency"), (["--gen-tokens", "-1"], "--gen-tokens"),
    (["--plot", "a.jpg"], "--plot"), (["--json"], "--json"), (["--ctx", "5"], "--ctx"),
    (["--json", "text.txt/x"], "--json text.txt/x"), (["--json", "no/x"], "--json no/x"),
    (["--chat-prompt-file", "a"], "--chat-prompt-file"), (["-sys", "a"], "--system"),
    (["--step-mul", "nan"], "--step-mul")])
def test_what_cannot_be_measured_is_misuse(bench, arguments, told):
    result = bench(*arguments)
    assert result.code == 2 and result.out == "" and told in result.err.splitlines()[0]


def test_a_text_that_is_too_short_says_how_long_it_is(bench):
    result = bench()
    assert result.code == 1 and result.out == "" and "need 32768" in result.err


def test_a_csv_that_is_there_is_kept(bench, tmp_path):
    (tmp_path / "a.csv").write_text("mine")
    refused = bench(*SMALL, "--csv", "a.csv")
    assert refused.code == 1 and "--overwrite" in refused.err and (tmp_path / "a.csv").read_text() == "mine"
    assert bench(*SMALL, "--csv", "a.csv", "--overwrite").out == "" and len(read_csv(tmp_path / "a.csv")) == 3


def test_logits_that_find_no_folder_are_one_line_after_the_rows_before(bench):
    result = bench(*SMALL, "--dump-frontier-logits-dir", "text.txt/x")
    told, = [line for line in result.err.splitlines() if line.startswith("ds4mlx bench:")]
    assert result.code == 1 and told.endswith("Not a directory; the rows before are kept")


def test_a_full_disk_keeps_whole_rows_and_says_the_one_that_is_lost(tmp_path):
    file = CsvFile(tmp_path / "a.csv")
    file.add(row(64))
    size = os.path.getsize(file.path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, hard))     # a disk with room for five bytes more
    try:
        with pytest.raises(Ds4Error, match="128,64,100.00,4,10.00"):
            file.add(row(128))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [r.ctx_tokens for r in read_csv(file.path)] == [64]
    file.close()


def test_ctrl_c_keeps_the_frontiers_that_are_measured(bench, tiny_path, tmp_path):
    (tmp_path / "long.txt").write_text("The river carries stones down to the valley. " * 4000)
    process = pexpect.spawn(sys.executable, ["-m", "ds4mlx", "bench", "-m", str(tiny_path), "--prompt-file", "long.txt",
                                             "--ctx-start", "128", "--ctx-max", "20000", "--step-incr", "128",
                                             "--gen-tokens", "2", "--csv", "a.csv", "--json", "a.json"],
                            timeout=60, dimensions=(50, 120))
    process.expect("[1-9][0-9]* of 157 frontiers")      # of the live table
    process.kill(signal.SIGINT)
    process.expect(pexpect.EOF)
    process.close()
    kept = read_csv(tmp_path / "a.csv")
    assert process.exitstatus == 130 and kept and b"are measured" in process.before
    assert len(json.loads((tmp_path / "a.json").read_text())["rows"]) == len(kept)


def test_files_of_ds4_are_read_too(tmp_path):
    (tmp_path / "old.csv").write_text("ctx_tokens,prefill_tokens,prefill_tps,gen_tokens,gen_tps,kvcache_bytes\n"
                                      "2048,2048,1375.32,64,33.53,52184460\n")
    found, = read_csv(tmp_path / "old.csv")
    assert (found.ctx_tokens, found.prefill_tps, found.kvcache_bytes) == (2048, 1375.32, 52184460)


@pytest.mark.parametrize("content, told", [("", "begins with"), ("a,b\n1,2\n", "'a,b'"), (HEADER + "\n1,2\n", "line 2"),
                                           (HEADER + "\n1,2,x,4,5,6,7,8,9\n", "line 2")])
def test_a_file_of_something_else_is_refused(ds4mlx, tmp_path, content, told):
    (tmp_path / "a.csv").write_text(content)
    result = ds4mlx("bench", "--compare", "a.csv", "a.csv")
    assert result.code == 1 and result.out == "" and told in result.err


def test_two_files_are_compared_where_both_measured(ds4mlx, tmp_path):
    for name, found in {"a": [row(64), row(128)], "b": [row(64, 150, 20), row(192), row(128, 50, 20, 128)]}.items():
        file = CsvFile(tmp_path / f"{name}.csv")
        for one in found:
            file.add(one)
        file.close()
    out = ds4mlx("bench", "--compare", "a.csv", "b.csv").out
    assert [line.split() for line in out.splitlines()[2:5]] == [
        ["64", "100.00", "150.00", "1.500", "10.00", "20.00", "2.000"],
        ["128", "100.00", "50.00", "10.00", "20.00", "2.000"], ["mean", "of", "B/A", "1.500", "2.000"]]
    assert "128: the intervals differ" in out


@pytest.mark.parametrize("name, begins", [("a.png", b"\x89PNG"), ("a.svg", b"<?xml")])
def test_a_plot_is_drawn_with_the_limit_of_the_memory(ds4mlx, tiny_path, bench, tmp_path, name, begins):
    arguments = ["bench", "-m", tiny_path, "--prompt-file", "text.txt", *SMALL, "--bandwidth-gb-s", "1234"]
    assert ds4mlx(*arguments, "--plot", name).code == 0
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(begins) and (name == "a.png" or b"1,234 GB/s" in drawn)


@pytest.mark.parametrize("contexts, ticks", [
    ([1], {"1"}), ([2048], {"2k"}), ([4096, 4352], {"4k", "4160"}), ([64, 384], {"128", "256"}),
    ([512, 8192], {"2k", "4k", "8k"}), ([2048, 102_400], {"32k", "96k"})])
def test_contexts_of_a_plot_are_at_round_numbers(tmp_path, contexts, ticks):
    plot(tmp_path / "a.svg", {"a": [row(context) for context in contexts]}, "title")
    drawn = (tmp_path / "a.svg").read_text()
    assert ticks <= set(re.findall(r">(\d+k?)<", drawn)) and not re.search(r">\d+\.\d+k<", drawn)
