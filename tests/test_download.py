"""download.sh, against a server of this test's own."""
import functools
import hashlib
import shutil
import subprocess
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "download.sh"
CONTENT = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()
pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")


class Handler(SimpleHTTPRequestHandler):
    """Serves a file from a byte on, as the resumption of a download asks for; the parent class cannot."""

    def do_GET(self):
        name = self.path.lstrip("/")
        files = {"model.gguf": CONTENT, "page.gguf": b"<html>not found</html>"}
        if name not in files:
            return self.send_error(404)
        start = int(self.headers.get("Range", "bytes=0-")[len("bytes="):-1])
        self.send_response(206 if start else 200)
        self.send_header("Content-Range", f"bytes {start}-{len(files[name]) - 1}/{len(files[name])}")
        self.send_header("Content-Length", str(len(files[name]) - start))
        self.end_headers()
        self.server.sent.append(len(files[name]) - start)
        self.wfile.write(files[name][start:])

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.sent = []
        thread = threading.Thread(target=functools.partial(server.serve_forever, 0.01))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def download(folder, *arguments):
    return subprocess.run(["sh", SCRIPT, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def url(server, name="model.gguf"):
    return f"http://127.0.0.1:{server.server_port}/{name}"


def test_the_link_leads_to_the_folder_of_models_whatever_cd_prints(server, tmp_path, monkeypatch):
    monkeypatch.setenv("DS4MLX_MODELS", "models")
    monkeypatch.setenv("CDPATH", str(tmp_path))  # makes cd say where it went
    assert download(tmp_path, url(server)).returncode == 0
    assert (tmp_path / "ds4flash.gguf").resolve() == tmp_path / "models" / "model.gguf"


def test_a_file_is_fetched_checked_and_linked(server, tmp_path):
    result = download(tmp_path, url(server), SHA256.upper())
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "ds4flash.gguf").is_symlink() and (tmp_path / "ds4flash.gguf").read_bytes() == CONTENT
    assert not list(tmp_path.glob("*.partial"))


def test_an_interrupted_download_goes_on(server, tmp_path):
    (tmp_path / "model.gguf.partial").write_bytes(CONTENT[:1000])
    assert download(tmp_path, url(server), SHA256).returncode == 0
    assert server.sent == [len(CONTENT) - 1000]


def test_a_wrong_digest_leaves_no_link(server, tmp_path):
    result = download(tmp_path, url(server), "0" * 64)
    assert result.returncode == 1 and SHA256 in result.stderr and not (tmp_path / "ds4flash.gguf").exists()


@pytest.mark.parametrize("name, told", [("page.gguf", "no GGUF file"), ("absent.gguf", "run the same command again"),
                                        ("page.html", "does not end in a .gguf")])
def test_what_is_no_model_is_refused(server, tmp_path, name, told):
    result = download(tmp_path, url(server, name))
    assert result.returncode == 1 and told in result.stderr and not (tmp_path / "ds4flash.gguf").exists()


def test_a_model_of_ones_own_is_not_replaced_by_a_link(server, tmp_path):
    (tmp_path / "ds4flash.gguf").write_bytes(b"mine")
    assert download(tmp_path, url(server)).returncode == 1
    assert (tmp_path / "ds4flash.gguf").read_bytes() == b"mine"


@pytest.mark.parametrize("arguments, code", [([], 2), (["a", "b", "c"], 2), (["http://x/m.gguf", "xyz"], 1)])
def test_misuse_says_how_it_is_used(tmp_path, arguments, code):
    result = download(tmp_path, *arguments)
    assert result.returncode == code and result.stdout == "" and result.stderr
