"""`ds4mlx eval`: cases in, verdicts out. The scripted engine answers with the question."""
import json
import os
import resource
import signal
import sys

import pexpect
import pytest

from ds4mlx.errors import Ds4Error
from ds4mlx.evaluation.trace import TraceFile, read_trace

SHORT = ("-n", "200", "--hard-limit-reply-budget", "10", "--soft-limit-reply-budget", "20")


def case(name, question="Answer: 5", answer="5", **more):
    return json.dumps({"id": name, "suite": "mine", "kind": "integer", "question": question, "answer": answer,
                       "source": "mine"} | more)


@pytest.fixture
def cases(tmp_path):
    """One that the echo gets right, one that it gets wrong: the last line says what to write, and has no number."""
    text = "\n".join([case("right", kind="text", question="Say this", checks=[{"equals": "Say this"}], answer=""),
                      case("wrong", kind="text", question="Say that", checks=[{"equals": "this"}], answer="")])
    (tmp_path / "mine.jsonl").write_text(text)
    return "--cases", "mine.jsonl", "--source", "mine", "--suite", "all"


@pytest.fixture
def evaluate(ds4mlx, tiny_path, cases):
    return lambda *arguments: ds4mlx("eval", "-m", tiny_path, "--engine", "stub", *cases, *SHORT, *arguments)


def test_each_case_is_a_line_and_the_end_a_table(evaluate):
    result = evaluate()
    lines = result.out.splitlines()
    assert result.code == 0 and lines[0].startswith("1/2 right passed given=Say this expected=its checks")
    assert lines[1].startswith("2/2 wrong failed") and lines[-1] == "1 of 2 passed"
    assert "\x1b" not in result.out


@pytest.mark.parametrize("wanted, code", [("1", 0), ("2", 3), ("50%", 0), ("51%", 3), ("0", 0)])
def test_too_few_passed_exits_with_3(evaluate, wanted, code):
    assert evaluate("--min-pass", wanted).code == code


@pytest.mark.parametrize("options, told", [(["--think-max"], True), (["--think-max", "-c", "400000"], False),
                                           (["--think-level", "high"], False), (["--nothink"], False)])
def test_an_effort_that_the_context_is_too_small_for_is_told(evaluate, options, told):
    said = evaluate("--effort-profile", "preview", *options).err
    assert ("effort max needs a larger context than 32768 tokens; using high" in said) is told


def test_what_a_model_says_moves_no_cursor(evaluate, tmp_path):
    (tmp_path / "mine.jsonl").write_text(case("a", "say \x1b[2J", kind="text", answer="", checks=[{"words": 1}]))
    assert "say \\x1b[2J" in (out := evaluate().out) and "\x1b" not in out


def test_the_result_is_one_object_too(evaluate, tmp_path):
    evaluate("--json", "out.json", "--min-pass", "50%")
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["cases"], found["passed"], found["min_pass"]) == (2, 1, 1)
    assert [(r["id"], r["verdict"], r["closed"]) for r in found["results"]] == [
        ("right", "passed", "model"), ("wrong", "failed", "model")]


def test_a_trace_is_graded_again_without_a_model(evaluate, ds4mlx, tmp_path):
    first = evaluate("--trace", "t.jsonl")
    again = ds4mlx("eval", "--regrade-trace", "t.jsonl", "--min-pass", "1")
    assert again.code == 0 and again.out.splitlines()[-1] == "1 of 2 passed"
    assert again.out.splitlines() == first.out.splitlines()[2:]
    line, *rest = (tmp_path / "t.jsonl").read_text().splitlines()
    changed = json.loads(line)
    changed["case"]["checks"] = [{"equals": "another"}]
    (tmp_path / "t.jsonl").write_text("\n".join([json.dumps(changed), *rest]))
    assert "right: passed before, failed by this grading" in ds4mlx("eval", "--regrade-trace", "t.jsonl").out


def test_a_trace_holds_what_was_asked_and_said_and_is_never_replaced(evaluate, tmp_path):
    evaluate("--trace", "t.jsonl")
    found = read_trace(tmp_path / "t.jsonl")
    assert found[0].case.prompt() == "Say this" and found[0].said.text.endswith("</think>Say this")
    assert oct(os.stat(tmp_path / "t.jsonl").st_mode & 0o777) == "0o600"
    refused = evaluate("--trace", "t.jsonl")
    assert refused.code == 2 and "t.jsonl" in refused.err and len(read_trace(tmp_path / "t.jsonl")) == 2


def test_a_trace_that_was_cut_off_keeps_its_whole_lines(evaluate, ds4mlx, tmp_path):
    evaluate("--trace", "t.jsonl")
    whole = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl").write_bytes(whole[:-20])
    assert ds4mlx("eval", "--regrade-trace", "t.jsonl").out.splitlines()[-1] == "1 of 1 passed"
    (tmp_path / "t.jsonl").write_bytes(b"{}\n" + whole)
    assert "line 1" in ds4mlx("eval", "--regrade-trace", "t.jsonl").err


def test_a_full_disk_keeps_the_cases_before(evaluate, tmp_path):
    evaluate("--trace", "a.jsonl")
    first, second = read_trace(tmp_path / "a.jsonl")
    file = TraceFile(tmp_path / "b.jsonl")
    file.add(first)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (os.path.getsize(file.path) + 9, hard))
    try:
        with pytest.raises(Ds4Error, match="the cases before wrong are there"):
            file.add(second)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        file.close()
    assert read_trace(file.path) == [first]


def test_an_answer_that_does_not_come_is_asked_for_once_more(evaluate, tmp_path):
    (tmp_path / "mine.jsonl").write_text(case("long", "word " * 250, kind="text", answer="", checks=[{"words": 250}]))
    assert " incomplete " in evaluate("--nothink").out.splitlines()[0]
    result = evaluate("--nothink", "--retry-incomplete", "--json", "out.json")
    assert " passed " in result.out.splitlines()[0] and "asked again" in result.err
    assert json.loads((tmp_path / "out.json").read_text())["results"][0]["tries"] == 2


def test_the_cases_of_the_package_are_there_without_any_file(ds4mlx, tiny_path):
    listed = ds4mlx("eval", "--list-cases", "--suite", "all").out
    assert listed.count("\n") > 60 and "tools-two-at-once" in listed
    assert "can be asked and graded" in ds4mlx("eval", "--validate-cases", "--suite", "all").out
    asked = ds4mlx("eval", "-m", tiny_path, "--engine", "stub", *SHORT, "--case-id", "tools-one", "--case-id",
                   "lookup-start")
    assert asked.code == 0 and asked.out.splitlines()[-1].endswith("of 2 passed")


def test_cases_are_chosen_by_place_number_and_domain(ds4mlx):
    def names(*arguments):
        return [line.split()[1] for line in ds4mlx("eval", "--list-cases", *arguments).out.splitlines()[2:]]
    everything = names()
    assert names("--case-sequence", "3,1") == [everything[2], everything[0]] and names("--questions", "2") == \
        everything[:2]
    assert names("--domain", "tools") == [name for name in everything if name.startswith("tools")]


def test_the_extractors_can_be_tried_where_ds4mlx_is(ds4mlx):
    result = ds4mlx("eval", "--self-test-extractors")
    assert result.code == 0 and "texts are read as they should be" in result.out


@pytest.mark.parametrize("arguments, told", [
    (["--suite", "x"], "--suite"), (["--case-id", "x"], "--case-id"), (["--case-sequence", "0"], "--case-sequence"),
    (["--questions", "x"], "--questions"), (["--min-pass", "101%"], "--min-pass"), (["--min-pass", "3"], "--min-pass"),
    (["--hard-limit-reply-budget", "30"], "--hard-limit-reply-budget"), (["-n", "5"], "--hard-limit-reply-budget"),
    (["-n", "1000000"], "1000000"), (["--cases", "none"], "none"), (["--gpqa", "none"], "none"),
    (["--source", "x"], "no case"), (["--regrade-trace", "none"], "none"), (["--pause-ms", "x"], "--pause-ms"),
    (["--soft-limit-think-close-rank", "0"], "--soft-limit-think-close-rank"),
    (["--cases", "mine.jsonl"], "two cases"), (["--json", "no/such/folder"], "--json no/such/folder"),
    (["--json", "."], "--json .")])
def test_misuse_is_told_in_one_line(evaluate, arguments, told):
    result = evaluate(*arguments)
    assert result.code == 2 and told in result.err.splitlines()[0] and "Traceback" not in result.err


@pytest.fixture
def terminal(tiny_path, cases):
    """terminal(*arguments): eval on a pseudo-terminal."""
    started = []

    def spawn(*arguments):
        process = pexpect.spawn(sys.executable, ["-m", "ds4mlx", "eval", "-m", str(tiny_path), "--engine", "stub",
                                                 *cases, *SHORT, *arguments],
                                timeout=60, dimensions=(30, 110), encoding="utf-8")
        started.append(process)
        return process
    yield spawn
    for process in started:
        process.close(force=True)


def test_on_a_terminal_cases_and_text_stand_side_by_side(terminal):
    process = terminal("--pause-ms", "300")
    process.expect("passed")
    process.expect("1 passed")
    process.expect("1 of 2 passed\r\n")     # below, when the screen is gone
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0


def test_keys_pause_choose_and_leave(terminal):
    process = terminal("--pause-ms", "60000")
    process.expect("▶ passed")          # and now it waits a minute
    process.send("p")
    process.expect("paused")
    process.send("\x1b[B")
    process.expect("▶ pending")
    process.send("q")
    process.expect("1 of 2 passed\r\n")
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 0


def test_enter_asks_a_case_without_waiting_for_the_next(terminal):
    process = terminal("--pause-ms", "60000")
    process.expect("▶ passed")
    process.send("\x1b[B")
    process.expect("▶ pending")
    process.send("\r")
    process.expect("▶ failed")


def test_ctrl_c_ends_a_pause_with_the_report(terminal):
    process = terminal("--pause-ms", "60000")
    process.expect("▶ passed")
    process.send("p")
    process.expect("paused")
    process.send("\x03")
    process.expect("1 of 2 passed\r\n")
    process.expect(pexpect.EOF)
    process.close()
    assert process.exitstatus == 130


def test_ctrl_c_stops_the_case_and_reports_the_others(start, tiny_path, tmp_path):
    lines = [case("quick", "Say", kind="text", answer="", checks=[{"equals": "Say"}]),
             case("long", "word " * 3000, kind="text", answer="", checks=[{"words": 3000}])]
    (tmp_path / "two.jsonl").write_text("\n".join(lines))
    process = start("eval", "-m", tiny_path, "--cases", "two.jsonl", "--suite", "mine", "--nothink", "-n", "100000",
                    "--trace", "t.jsonl", "--engine", "stub")
    assert process.stdout.readline().startswith("1/2 quick passed")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out.endswith("1 of 2 passed\n") and "stopped at long" in err
    assert [found.case.id for found in read_trace(tmp_path / "t.jsonl")] == ["quick"]
