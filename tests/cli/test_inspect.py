"""`ds4mlx inspect` describes a file without loading it."""
import json
import subprocess
import sys
from argparse import ArgumentParser

import pytest
from sparse_model import SMALL, metadata_of, tensors_of, write_model

from ds4mlx.cli import inspect
from ds4mlx.errors import ModelFileError, UsageError
from ds4mlx.models.deepseek_v4.config import FLASH

PUBLISHED_Q2 = {  # bytes in the published file
    "routed experts": 77_913_391_104, "attention": 4_886_759_424, "shared experts": 1_149_763_584,
    "token embedding": 1_059_061_760, "output matrix": 562_626_560, "compressors": 522_971_136,
    "indexers": 451_465_728, "routers and biases": 90_218_496, "hyper-connections": 67_773_532,
    "hash tables": 9_308_160, "other norms, sinks": 1_436_416}


def run(*argv):
    parser = ArgumentParser()
    inspect.add_parser(parser.add_subparsers(dest="command"))
    args = parser.parse_args(["inspect", *map(str, argv)])
    return args.run(args)


@pytest.fixture
def small(tmp_path):
    return write_model(tmp_path / "small.gguf", metadata_of(SMALL), tensors_of(SMALL))


@pytest.fixture(scope="module")
def flash(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("flash") / "flash.gguf", metadata_of(FLASH), tensors_of(FLASH))


@pytest.fixture
def flash_summary(flash, capsys):
    assert run(flash, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_tensor_families_have_their_published_sizes(flash_summary):
    assert {f["name"]: f["nbytes"] for f in flash_summary["families"]} == PUBLISHED_Q2
    assert flash_summary["weights_bytes"] == 86_714_775_900
    assert flash_summary["families"][0]["kinds"] == ["IQ2_XXS", "Q2_K"]


def test_a_million_tokens_need_3_7_gb_of_state(flash_summary):
    """3.688 GB of packed rows; frontiers, tokens and logits are under 20 MB more."""
    memory = flash_summary["memory"][-1]
    assert memory["context"] == 1_048_576
    assert 3.688e9 <= memory["session_bytes"] < 3.708e9
    assert {int(slots): total - flash_summary["weights_bytes"] for slots, total in memory["total_bytes"].items()} == {
        slots: slots * memory["session_bytes"] for slots in (1, 2, 4, 8, 16)}


def test_flash_has_284_billion_parameters(flash_summary):
    tables = next(f for f in flash_summary["families"] if f["name"] == "hash tables")
    parameters = sum(f["parameters"] for f in flash_summary["families"]) - tables["parameters"]
    assert round(parameters / 1e9, 1) == 284.3


def test_plain_output_names_the_facts_and_has_no_decoration(small, capsys):
    run(small)
    out = capsys.readouterr().out
    for fact in ("a model", "5: 2 window only, 2 ratio 4, 1 ratio 128; 3 hash-routed", "IQ2_XXS Q2_K", "1,048,576"):
        assert fact in out
    assert out.isascii() and "\x1b" not in out


def test_a_terminal_gets_the_same_facts(small, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "200")
    run(small)
    out = capsys.readouterr().out
    for fact in ("a model", "5: 2 window only, 2 ratio 4, 1 ratio 128; 3 hash-routed", "IQ2_XXS Q2_K", "1,048,576"):
        assert fact in out


def test_a_name_cannot_steer_the_terminal(tmp_path, capsys):
    metadata = metadata_of(SMALL) | {"general.name": "a\x1b[2Jb"}
    run(write_model(tmp_path / "m.gguf", metadata, tensors_of(SMALL)))
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\N{REPLACEMENT CHARACTER}[2Jb" in out


def test_a_name_without_end_is_cut(tmp_path, capsys):
    run(write_model(tmp_path / "m.gguf", metadata_of(SMALL) | {"general.name": "n" * 10**6}, tensors_of(SMALL)))
    name, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("name "))
    assert 200 <= len(name) < 300


def test_the_source_checkpoint_is_shown_where_the_file_says_it(tmp_path, capsys):
    metadata = metadata_of(SMALL) | {"ds4mlx.checkpoint": "flash-0731", "ds4mlx.source_fp": "ab" * 32}
    run(write_model(tmp_path / "m.gguf", metadata, tensors_of(SMALL)), "--json")
    summary = json.loads(capsys.readouterr().out)
    assert (summary["checkpoint"], summary["base_fp"]) == ("flash-0731", "ab" * 32)
    assert summary["weights_fp"] != summary["base_fp"]


def test_a_file_that_is_no_model_is_one_error(tmp_path):
    (tmp_path / "m.txt").write_text("not a model at all")
    with pytest.raises(ModelFileError, match="not a GGUF file"):
        run(tmp_path / "m.txt")


def test_one_file_at_a_time(small):
    with pytest.raises(UsageError, match="need one file"):
        run(small, "--model", small)


def test_inspecting_needs_no_mlx(small):
    code = ("import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None; from pathlib import Path\n"
            "from ds4mlx.cli.inspect import plain, summarize; from ds4mlx.gguf.reader import GGUF\n"
            "print(list(plain(summarize(GGUF.open(sys.argv[1])))))")
    assert "hash-routed" in subprocess.run([sys.executable, "-c", code, small], capture_output=True, text=True).stdout
