import json

import pytest

from ds4mlx.cli.main import main


def test_the_plan_of_a_file_sums_its_kernels(tiny_path, capsys):
    assert main(["bench", "--plan", "--model", str(tiny_path), "--ctx", "300", "--json"]) == 0
    out, progress = capsys.readouterr()
    plan = json.loads(out)
    read = sum(layer["count"] * cost["read_bytes"] for layer in plan["layers"] for cost in layer["costs"])
    assert plan["context"] == 300 and read == plan["read_bytes"] > 0 and "counting ratio 128" in progress


def test_bench_says_what_it_can_measure(capsys):
    assert main(["bench"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("ds4mlx bench: nothing to measure on") and "--prompt-file" in told
    assert "--plan counts the launches and bytes of a token" in told


def test_types_of_a_file_cannot_be_chosen(tiny_path, capsys):
    assert main(["bench", "--plan", "--model", str(tiny_path), "--quant", "q4"]) == 2
    assert "has types of its own" in capsys.readouterr().err


@pytest.mark.parametrize("flags, told", [
    (["--op", "attention", "--engine", "cuda"], "--op is 'attention', need one of attention-in, queries"),
    (["--op", "all"], "need --engine cuda"),
    (["--op", "all", "--engine", "cuda", "--op-tokens", "1,none"], "--op-tokens is 'none'"),
    (["--op", "sample", "--engine", "cuda", "--op-tokens", "17"], "need a whole number from 1 to 16"),
])
def test_products_are_measured_by_name_on_a_card(flags, told, capsys):
    assert main(["bench", *flags]) == 2
    assert told in capsys.readouterr().err
