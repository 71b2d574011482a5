"""Every kernel has its case, and a case finds what is wrong with a kernel."""
import os
import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from spoiled_kernel import spoiled

from ds4mlx import ops
from ds4mlx.engine import mlx_kernels
from ds4mlx.engine.mlx_kernel_cases import SIZES, Case, cases
from ds4mlx.engine.mlx_kernel_checks import Near
from ds4mlx.metal_kernels.emulator import NoCompilerError
from ds4mlx.ops.kernel import observe

FOLDER = Path(__file__).parents[2] / "metal_kernels"
ONE_OF_EACH = ["dequantize: MXFP4", "router, 1 token", "expert_down: q2, 1 token", "hyper_enter: 1 token",
               "latent: 1 token behind 0", "compress_step: index rows, 1 token from 1027 on",
               "attention: chosen rows, 16", "index_scores: packed, 256 rows, 3 tokens",
               "select_rows: 16 of 256, 1 token", "route: by score, 1 token", "sample: top-p, the draw of rank 21",
               "latent_step: 5 sequences", "compress_token: index rows, 5 sequences up to 1027",
               "attention_step: chosen rows, 5 sequences, float32", "index_scores_step: packed, 256 rows, 5",
               "sample: 5 rows"]


def entries():
    """Every kernel there is, as STEM_ENTRY."""
    return {f"{path.stem}_{entry}" for path in FOLDER.glob("*.metal")
            for entry in re.findall(r"(?m)^// ---- kernel (\w+)$", path.read_text())}


def launched(case):
    """The kernels that a case asks for; nothing is computed."""
    seen = []

    def stand_in(launch):
        seen.append(re.sub(r"(_[a-z]+\d+)+$", "", launch.kernel))   # without the macros of its text
        return [mx.zeros(shape, dtype) for shape, dtype in launch.outputs]
    call = case.build(np.random.default_rng(7))
    with ops.only("metal", exact=case.exact), observe(stand_in):
        assert len(call()) == len(case.checks)
    return seen


@pytest.mark.parametrize("sizes", ["small", pytest.param("flash", marks=pytest.mark.sweep)])
def test_every_kernel_has_a_case_and_every_case_a_kernel(sizes):
    seen = {case.name: launched(case) for case in cases(SIZES[sizes])}
    assert [name for name, kernels in seen.items() if not kernels] == []
    assert {kernel for kernels in seen.values() for kernel in kernels} == entries()


def test_no_two_cases_have_one_name():
    for sizes in SIZES:
        names = mlx_kernels.names(sizes)
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_kernels_pass_in_the_emulator(name):
    (result,) = mlx_kernels.check_all("small", "metal-emulated", name)
    assert result.passed and result.fault == "" and result.kernels and result.least_bytes > 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", mlx_kernels.names("small"))
def test_all_kernels_pass_in_the_emulator(name):
    results = mlx_kernels.check_all("small", "metal-emulated", name)
    assert [(result.name, result.fault) for result in results if not result.passed] == []


@pytest.mark.parametrize("only, file, text, mistake, told", [
    ("latent: 1 token behind 0", "latent.metal", "float(D) + eps", "float(D + 1) + eps", "scales differ"),  # by 0.4 %
    ("select_rows: 16 of 256, 1 token", "indexer_topk.metal", "positions[t] + 1", "positions[t] - 511",
     "entries differ"),
    ("hyper_enter: 1 token", "hyper_mix.metal", "= 2.0f * sigmoid(totals[N", "= 2.001f * sigmoid(totals[N", "")])
def test_a_kernel_that_computes_something_else_fails(only, file, text, mistake, told):
    with spoiled(file, text, mistake):
        (result,) = mlx_kernels.check_all("small", "metal-emulated", only)
    assert not result.passed and result.fault == "" and told in result.worst.note


@pytest.mark.parametrize("text, mistake, told", [
    ("uint slot = 2 * N", "uint slot = missing * N", "CompileError: .*missing"),
    ("post[t * N + lane] = 2.0f", "post[t * N + lane + N] = 2.0f", "OutOfBoundsError: ")])
def test_a_kernel_that_does_not_compile_or_crashes_is_told_and_the_rest_goes_on(text, mistake, told):
    with spoiled("hyper_mix.metal", text, mistake):
        first, *rest = mlx_kernels.check_all("small", "metal-emulated", ": 1 token")
    assert (first.name, first.passed, first.kernels) == ("hyper_enter: 1 token", False, ("hyper_mix_enter",))
    assert re.match(told, first.fault, re.DOTALL) and len(rest) == 4 and all(result.passed for result in rest)


def die_on_the_first(sizes, implementation, only, i):
    return os.abort() if i == 0 else mlx_kernels.check(list(cases(SIZES[sizes]))[i], implementation)


def test_a_case_that_takes_its_process_down_costs_only_itself(monkeypatch):
    monkeypatch.setattr(mlx_kernels, "_check_one", die_on_the_first)
    first, *rest = mlx_kernels._isolated("small", "metal-emulated", "dequantize: F")
    assert not first.passed and "process died" in first.fault
    assert len(rest) == 1 and rest[0].passed


def test_an_op_that_runs_its_reference_instead_fails():
    case = Case("swiglu", "has no kernel", lambda rng: lambda: [ops.swiglu(mx.ones(3), mx.ones(3), 1.0)],
                (Near(1e-6, "the same"),))
    assert "no kernel was launched" in mlx_kernels.check(case, "metal-emulated").fault


def test_a_missing_compiler_is_no_fault_of_a_kernel():
    def call():
        raise NoCompilerError("none here")
    with pytest.raises(NoCompilerError):
        mlx_kernels.check(Case("any", "op", lambda rng: call, ()), "metal-emulated")


def test_a_timed_case_has_a_time_and_a_bandwidth(monkeypatch):
    monkeypatch.setattr(mlx_kernels, "MOST_CALLS", 2)   # here each takes as long as the emulator does
    monkeypatch.setattr(mlx_kernels, "MOST_INPUTS", 3)
    (case,) = [case for case in cases(SIZES["small"]) if case.name == "route: by token, 1 token"]
    result = mlx_kernels.check(case, "metal-emulated", timed=True)
    assert result.passed and result.microseconds > 0
    assert result.gb_s == pytest.approx(result.least_bytes / result.microseconds * 1e-3)


def test_the_bandwidth_of_a_copy_can_be_measured():
    assert mlx_kernels.copy_gb_s(floats=1024) > 0
