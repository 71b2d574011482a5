"""download.sh, against a server of this test's own that breaks off, lies and refuses."""
import hashlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fake_download_server import serving

SCRIPT = Path(__file__).parents[1] / "download.sh"
CONTENT = b"GGUF" + bytes(range(256)) * 2048
SHA256 = hashlib.sha256(CONTENT).hexdigest()
CHECKER = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
SHELLS = [shell for shell in (["dash"], ["bash", "--posix"], ["busybox", "sh"], ["ksh"]) if shutil.which(shell[0])]
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


@pytest.fixture
def server():
    files = {"model.gguf": CONTENT, "other.gguf": CONTENT[:-1], "draft.gguf": CONTENT, "page.gguf": b"<html>no</html>"}
    with serving(files) as server:
        yield server


@pytest.fixture
def script(tmp_path):
    """The script with targets that a test can serve, in the places of the published ones."""
    rows = [("q2", "main", len(CONTENT), SHA256, "model.gguf"), ("q4", "main", len(CONTENT), SHA256, "other.gguf"),
            ("mxfp4", "main", len(CONTENT), "0" * 64, "model.gguf"), ("pro", "main", 10 ** 18, SHA256, "huge.gguf"),
            ("dspark", "part", len(CONTENT), SHA256, "draft.gguf")]
    table = "\n".join(" ".join(map(str, row)) for row in rows)
    text, replaced = re.subn(r"(?<=cat <<'END'\n)q2 main .*?(?=\nEND)", table, SCRIPT.read_text(), count=1, flags=re.S)
    assert replaced
    path = tmp_path / "script" / "download.sh"
    path.parent.mkdir()
    path.write_text(text)
    return path


def place(folder, server, **variables):
    """How a download in a folder is run: away from any token of the user's."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "HF_ENDPOINT": server.url if server else ""}
    return {"cwd": folder, "env": environment | variables}


def download(folder, *arguments, server=None, script=SCRIPT, shell=("sh",), preexec_fn=None, **variables):
    """stdin, stdout and stderr are pipes; 60 s are more than any number of retries here takes."""
    where = place(folder, server, **variables)
    return subprocess.run([*shell, script, *arguments], capture_output=True, text=True, timeout=60,
                          restore_signals=preexec_fn is None, preexec_fn=preexec_fn, **where)


def wait_for(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "waited a minute in vain"
        time.sleep(0.01)


def url(server, name="model.gguf"):
    return f"{server.url}/{name}"


@pytest.mark.parametrize("shell", SHELLS, ids=" ".join)
def test_a_target_is_fetched_checked_and_linked_by_any_shell(server, script, tmp_path, shell):
    result = download(tmp_path, "q2", server=server, script=script, shell=shell)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
    assert (tmp_path / "ds4flash.gguf").is_symlink() and (tmp_path / "ds4flash.gguf").read_bytes() == CONTENT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ds4flash.gguf", "model.gguf", "script"]


def test_a_url_is_fetched_and_checked_as_a_target_is(server, tmp_path):
    assert download(tmp_path, url(server), SHA256.upper()).returncode == 0
    assert (tmp_path / "ds4flash.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["q2-imatrix", "ds4f-q2", "ds4f-q2-imatrix"])
def test_targets_have_the_names_of_ds4_too(server, script, tmp_path, name):
    assert download(tmp_path, name, server=server, script=script).returncode == 0


def test_the_link_leads_to_the_folder_of_models_whatever_cd_prints(server, tmp_path):
    assert download(tmp_path, url(server), DS4MLX_MODELS="models", CDPATH=str(tmp_path)).returncode == 0
    assert (tmp_path / "ds4flash.gguf").resolve() == tmp_path / "models" / "model.gguf"


# ---- connections

def test_an_interrupted_download_goes_on(server, tmp_path):
    (tmp_path / "model.gguf.partial").write_bytes(CONTENT[:1000])
    assert download(tmp_path, url(server), SHA256).returncode == 0
    assert server.starts == [1000]


def test_broken_connections_cost_no_byte_that_had_come(server, script, tmp_path):
    server.drop_after = 200_000
    result = download(tmp_path, "q2", server=server, script=script)
    assert result.returncode == 0 and server.starts == [0, 200_000, 400_000]
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(server, script, tmp_path):
    server.fail_first = 1
    assert download(tmp_path, "q2", server=server, script=script).returncode == 0


def test_a_server_that_refuses_ranges_begins_again(server, script, tmp_path):
    server.ranges = False
    (tmp_path / "model.gguf.partial").write_bytes(CONTENT[:1000])
    result = download(tmp_path, "q2", server=server, script=script)
    assert result.returncode == 0 and "starting over" in result.stderr
    assert (tmp_path / "model.gguf").read_bytes() == CONTENT


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_what_a_stopped_download_has_is_kept(server, script, tmp_path, number, code):
    server.hold_after = 300_000
    process = subprocess.Popen(["sh", script, "q2"], stderr=subprocess.DEVNULL, start_new_session=True,
                               **place(tmp_path, server))
    wait_for(lambda: (partial := tmp_path / "model.gguf.partial").exists() and partial.stat().st_size)
    os.killpg(process.pid, number)
    assert process.wait(60) == code
    kept = (tmp_path / "model.gguf.partial").stat().st_size
    server.hold_after = None
    assert download(tmp_path, "q2", server=server, script=script).returncode == 0
    assert server.starts == [0, kept] and (tmp_path / "model.gguf").read_bytes() == CONTENT


def test_two_do_not_write_one_file(server, script, tmp_path):
    server.hold_after = 1000
    first = subprocess.Popen(["sh", script, "q2"], stderr=subprocess.DEVNULL, **place(tmp_path, server))
    assert server.held.wait(60)
    second = download(tmp_path, "q2", server=server, script=script)
    first.terminate()
    assert first.wait(60) == 143
    assert second.returncode == 1 and f"process {first.pid} is fetching model.gguf" in second.stderr


# ---- what comes

def test_wrong_bytes_leave_no_link_and_do_not_stop_the_next_download(server, script, tmp_path):
    result = download(tmp_path, "mxfp4", server=server, script=script)
    assert result.returncode == 1 and SHA256 in result.stderr and not (tmp_path / "ds4flash.gguf").exists()
    assert (tmp_path / "model.gguf.wrong").read_bytes() == CONTENT
    assert download(tmp_path, "q2", server=server, script=script).returncode == 0


def test_a_file_of_another_size_is_refused_before_it_is_fetched(server, script, tmp_path):
    result = download(tmp_path, "q4", server=server, script=script)
    assert result.returncode == 1 and f"{len(CONTENT) - 1} bytes, need {len(CONTENT)}" in result.stderr
    assert server.starts == []


def test_a_file_that_is_there_is_checked_again(server, script, tmp_path):
    (tmp_path / "model.gguf").write_bytes(CONTENT[:-1] + b"?")
    result = download(tmp_path, "q2", server=server, script=script)
    assert result.returncode == 1 and SHA256 in result.stderr and server.requests == []


@pytest.mark.parametrize("name, told", [("page.gguf", "no GGUF file"), ("absent.gguf", "the server has no"),
                                        ("page.html", "does not end in a .gguf")])
def test_what_is_no_model_is_refused(server, tmp_path, name, told):
    result = download(tmp_path, url(server, name))
    assert result.returncode == 1 and told in result.stderr and not (tmp_path / "ds4flash.gguf").exists()


# ---- disk and links

def test_a_full_disk_keeps_what_it_had_room_for(server, script, tmp_path):
    result = download(tmp_path, "q2", server=server, script=script,     # a limit is a disk that ends there
                      preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000)))
    assert result.returncode == 1 and "is the disk full?" in result.stderr
    kept = (tmp_path / "model.gguf.partial").stat().st_size
    assert kept > 200_000 and download(tmp_path, "q2", server=server, script=script).returncode == 0
    assert server.starts == [0, kept]


def test_a_disk_without_room_is_known_before_anything_is_fetched(server, script, tmp_path):
    result = download(tmp_path, "pro", server=server, script=script)
    assert result.returncode == 1 and "need 1000000000.0 GB" in result.stderr and server.starts == []


@pytest.mark.parametrize("arguments", [["dspark"], ["q2", "--no-link"]])
def test_only_a_main_model_moves_the_link_and_only_if_wanted(server, script, tmp_path, arguments):
    (tmp_path / "ds4flash.gguf").symlink_to("mine.gguf")
    assert download(tmp_path, *arguments, server=server, script=script).returncode == 0
    assert (tmp_path / "ds4flash.gguf").readlink() == Path("mine.gguf")


def test_a_model_of_ones_own_is_not_replaced_by_a_link(server, tmp_path):
    (tmp_path / "ds4flash.gguf").write_bytes(b"mine")
    assert download(tmp_path, url(server)).returncode == 1
    assert (tmp_path / "ds4flash.gguf").read_bytes() == b"mine"


# ---- the token

def test_the_token_reaches_the_server_and_no_command_line(server, script, tmp_path):
    server.secret = "hf_Secret123"
    assert download(tmp_path, "q2", server=server, script=script, HF_TOKEN=server.secret).returncode == 0
    assert not any(server.secret in request.command_lines for request in server.requests)


def test_the_token_may_be_in_a_file(server, script, tmp_path):
    server.secret = "hf_Secret123"
    (tmp_path / "token").write_text("hf_Secret123\n")
    assert download(tmp_path, "q2", server=server, script=script, HF_TOKEN_PATH="token").returncode == 0


def test_without_a_token_that_is_needed_the_error_names_it(server, script, tmp_path):
    server.secret = "hf_Secret123"
    result = download(tmp_path, "q2", server=server, script=script)
    assert result.returncode == 1 and "set HF_TOKEN" in result.stderr


def test_the_token_goes_to_nobody_else(server, script, tmp_path):
    with serving({"model.gguf": CONTENT}) as other:
        server.elsewhere = other.url
        assert download(tmp_path, "q2", server=server, script=script, HF_TOKEN="hf_Secret").returncode == 0
        (tmp_path / "model.gguf").unlink()
        assert download(tmp_path, url(other), server=server, script=script, HF_TOKEN="hf_Secret").returncode == 0
        assert {request.authorization for request in other.requests} == {None}


def test_a_token_is_not_sent_over_an_open_network(tmp_path):
    result = download(tmp_path, "q2", HF_TOKEN="hf_Secret", HF_ENDPOINT="http://models.invalid")
    assert result.returncode == 1 and "unencrypted" in result.stderr and "hf_Secret" not in result.stderr


# ---- the script itself

@pytest.mark.parametrize("arguments, told", [
    ([], "need a TARGET or a URL"), (["a.gguf", "b", "c"], "one argument too many: c"), (["q3"], "no target q3"),
    (["--resume"], "unknown option: --resume"), (["q2", SHA256], "sum of a target is known")])
def test_misuse_says_how_it_is_used(tmp_path, arguments, told):
    result = download(tmp_path, *arguments)
    assert result.returncode == 2 and result.stdout == "" and told in result.stderr and "usage:" in result.stderr


def test_a_sum_that_cannot_be_one_is_refused(tmp_path):
    assert download(tmp_path, "http://x/m.gguf", "xyz").returncode == 1


def test_help_lists_the_targets_with_their_sizes(tmp_path):
    result = download(tmp_path, "--help")
    assert result.returncode == 0 and result.stderr == ""
    assert re.findall(r"^  (\S+) +([\d.]+) GB", result.stdout, re.M) == [
        ("q2", "86.7"), ("q2-q4", "97.5"), ("q4", "164.6"), ("mxfp4", "155.9"), ("dspark", "5.9"), ("pro", "464.6")]


@pytest.mark.skipif(CHECKER is None, reason="needs shellcheck")
def test_the_script_is_clean():
    result = subprocess.run([CHECKER, "--shell=sh", SCRIPT], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
