"""`ds4mlx doctor` without --kernels: what it finds, and that it says what to do."""
import hashlib
import json
import os
import shutil
import time

import pytest
from fake_download_server import serving

from ds4mlx.cli.checkup import EXAMINATIONS, LEAST_READ, read_gb_s


@pytest.fixture
def doctor(ds4mlx, tiny_path):
    """doctor(*options): the findings by what they are about, and the exit code as "code". Port 0 is always free."""
    def run(*options, model=tiny_path):
        result = ds4mlx("doctor", "--json", "-m", model, *([] if "--port" in options else ["--port", "0"]), *options)
        found = {finding["what"]: (finding["verdict"], finding["told"]) for finding in json.loads(result.out)}
        return found | {"code": result.code}
    return run


def test_a_machine_that_is_well_exits_with_0(doctor):
    found = doctor()
    assert found.keys() == {*EXAMINATIONS, "code"} and found["code"] == 0
    assert not [what for what in EXAMINATIONS if found[what][0] == "wrong"]


def test_text_is_a_line_for_each_finding(ds4mlx, tiny_path):
    result = ds4mlx("doctor", "-m", tiny_path, "--port", "0")
    assert [line.split()[1] for line in result.out.splitlines()] == list(EXAMINATIONS) and "\x1b" not in result.out


def test_a_model_that_is_missing_is_one_finding_among_others(doctor):
    found = doctor(model="none.gguf")
    assert found["code"] == 1 and found["model"][0] == "wrong" and "download.sh" in found["model"][1]
    assert found["memory"][0] == "ok" and "fit" not in found


def test_a_model_that_was_cut_is_found(doctor, tiny_path, tmp_path):
    (tmp_path / "cut.gguf").write_bytes(tiny_path.read_bytes()[:-1000])
    found = doctor(model="cut.gguf")
    assert found["code"] == 1 and found["model"][0] == "wrong" and "cut.gguf" in found["model"][1]


def test_the_sum_of_a_model_is_shown_and_compared(doctor, tiny_path):
    right, wrong = hashlib.sha256(tiny_path.read_bytes()).hexdigest(), "0" * 64
    assert right in doctor("--sha256")["sha256"][1] and doctor("--sha256", right.upper())["code"] == 0
    found = doctor("--sha256", wrong)
    assert found["code"] == 1 and found["sha256"][0] == "wrong" and "fetch it again" in found["sha256"][1]


@pytest.mark.parametrize("options", [["--sha256", "abc"], ["--sha256", "--kernels"]])
def test_a_sum_that_is_none_or_not_wanted_is_misuse(ds4mlx, tiny_path, options):
    result = ds4mlx("doctor", "-m", tiny_path, *options)
    assert result.code == 2 and "--sha256" in result.err


def test_what_does_not_fit_says_what_would(doctor, monkeypatch):
    monkeypatch.setenv("DS4MLX_MEMORY_LIMIT_GB", "1")
    found = doctor("--ctx", "100000", "--batched-session", "16")
    assert found["code"] == 1 and found["fit"][0] == "wrong" and "limit is 1.0 GB" in found["fit"][1]
    assert "use --" in found["fit"][1]


def test_a_port_in_use_is_found(doctor):
    with serving({}) as stranger:
        found = doctor("--port", str(stranger.server_port))
    assert found["code"] == 1 and found["port"][0] == "wrong" and str(stranger.server_port) in found["port"][1]


def test_a_state_folder_that_others_can_read_is_noted(doctor, tmp_path):
    (tmp_path / "home").mkdir(mode=0o755)
    os.chmod(tmp_path / "home", 0o755)
    found = doctor()
    assert found["state"][0] == "note" and "chmod 700" in found["state"][1] and found["code"] == 0


def test_a_clock_that_is_behind_the_files_is_noted(doctor, tiny_path, tmp_path):
    shutil.copy(tiny_path, tmp_path / "model.gguf")
    os.utime(tmp_path / "model.gguf", (time.time() + 7200,) * 2)
    found = doctor(model="model.gguf")
    assert found["clock"][0] == "note" and "set the clock" in found["clock"][1] and doctor()["clock"][0] == "ok"


def test_clients_are_found_by_their_names(doctor, tmp_path, monkeypatch):
    (tmp_path / "codex").write_text("#!/bin/sh\n")
    (tmp_path / "codex").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor()["clients"][1] == f"codex ({tmp_path / 'codex'}); ds4mlx wire NAME sets one up"


def test_states_that_the_disk_has_no_room_for_are_noted(doctor, monkeypatch):
    monkeypatch.setenv("DS4MLX_KV_DISK_DIR", "kv")
    monkeypatch.setenv("DS4MLX_KV_DISK_SPACE_MB", str(1 << 30))
    found = doctor()
    assert found["disk"][0] == "note" and "make room" in found["disk"][1]


def test_the_speed_of_a_disk_needs_a_file_of_some_size(tmp_path):
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, LEAST_READ - 1)
    assert read_gb_s(path) is None
    os.truncate(path, LEAST_READ)
    assert read_gb_s(path) > 0
