"""`ds4mlx doctor --kernels`, by way of the emulator."""
import json
from pathlib import Path

import pytest
from spoiled_kernel import spoiled

from ds4mlx import __version__, ops

EMULATED = ("doctor", "--kernels", "--ops", "metal-emulated")
REPORT = Path("ds4mlx-kernels-report.json")
without_metal = pytest.mark.skipif(ops.device() == "metal", reason="there is Metal here")


def report(path=REPORT):
    return json.loads(path.read_text())


def test_kernels_that_pass_exit_with_0_and_leave_a_report(ds4mlx):
    result = ds4mlx(*EMULATED, "--only", "latent: 1 token behind 0")
    (case,) = report()["cases"]
    assert result.code == 0 and str(REPORT) in result.err and "all 1 cases passed" in result.err
    assert (case["passed"], case["fault"]) == (True, "")
    assert [name.startswith("latent_latent") for name in case["kernels"]] == [True]
    assert [output["unit"] for output in case["outputs"]] == ["of the largest value", "steps"]


def test_a_report_says_what_was_tried_and_where_and_nothing_of_who(ds4mlx):
    ds4mlx(*EMULATED, "--only", "hyper_leave")
    found = report()
    assert (found["ds4mlx"], found["ops"], found["sizes"]) == (__version__, "metal-emulated", "small")
    assert found["machine"].keys() == {"device", "memory_bytes", "system", "mlx", "copy_gb_s", "published_gb_s"}
    assert str(Path.home()) not in REPORT.read_text() and str(Path.cwd()) not in REPORT.read_text()


def test_every_case_is_told_as_it_ends_and_then_all_in_a_table(ds4mlx):
    result = ds4mlx(*EMULATED, "--only", "latent: 1 token")
    assert [line.split(" ok, ")[0] for line in result.err.splitlines()[:3]] == [
        "1/3 latent: 1 token behind 0:", "2/3 latent: 1 token behind 128:", "3/3 latent: 1 token behind 128, float32:"]
    assert result.out.startswith("Metal kernels on ") and result.out.count(" ok\n") == 3


def test_one_that_fails_exits_with_1_and_says_why(ds4mlx):
    with spoiled("hyper_mix.metal", "= 2.0f * sigmoid(totals[N", "= 2.1f * sigmoid(totals[N"):
        result = ds4mlx(*EMULATED, "--only", "hyper_enter: 1 token")
    assert result.code == 1 and "hyper_enter: 1 token: FAILED" in result.out and "1 of 1 cases failed" in result.err
    assert report()["failed"] == 1 and not report()["cases"][0]["passed"]


def test_one_that_does_not_compile_is_in_the_report_with_the_compilers_words(ds4mlx):
    with spoiled("hyper_mix.metal", "uint slot = 2 * N", "uint slot = missing * N"):
        result = ds4mlx(*EMULATED, "--only", ": 1 token")
    assert result.code == 1 and [case["passed"] for case in report()["cases"]] == [False, True, True, True, True]
    assert "missing" in report()["cases"][0]["fault"] and "missing" in result.out


def test_json_is_the_report(ds4mlx):
    result = ds4mlx(*EMULATED, "--only", "hyper_leave", "--json", "--report", "other.json")
    assert json.loads(result.out) == report(Path("other.json")) and not REPORT.exists()


def test_a_report_is_never_overwritten(ds4mlx):
    REPORT.write_text("of yesterday")
    result = ds4mlx(*EMULATED, "--only", "hyper_leave")
    assert result.code == 2 and "there already" in result.err and REPORT.read_text() == "of yesterday"


@pytest.mark.parametrize("options, told", [
    (("--only", "x"), "--only is for --kernels"), (("--kernels", "--ops", "cuda"), "need metal or metal-emulated"),
    (("--kernels", "--ops", "metal-emulated", "--only", "no such"), "no case has that in its name"),
    (("--kernels", "--ops", "metal-emulated", "--report", "no/such/folder"), "make it first")])
def test_misuse_is_told(ds4mlx, options, told):
    result = ds4mlx("doctor", *options)
    assert result.code == 2 and told in result.err and not REPORT.exists()


@without_metal
def test_without_metal_the_emulator_is_named(ds4mlx):
    result = ds4mlx("doctor", "--kernels")
    assert result.code == 2 and "no Metal device" in result.err and "--ops metal-emulated" in result.err


def test_the_environment_chooses_the_emulator(ds4mlx, monkeypatch):
    monkeypatch.setenv("DS4MLX_OPS", "metal-emulated")
    assert ds4mlx("doctor", "--kernels", "--only", "hyper_leave").code == 0
