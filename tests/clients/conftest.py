"""The scripted model behind a real server, with the model's own vocabulary, and what the server's trace tells."""
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from running_server import Server, start, stop
from scripted_model import ScriptedModel

CTX = 65536


@dataclass
class House:
    """A server that can be restarted over one cache directory, and one trace for each of its lives."""
    tokenizer: object
    folder: Path
    server: Server | None = None
    lives: int = 0

    def restart(self, tells=None, **stub):
        """Another server; `tells` is what its model says, `stub` goes to its engine."""
        self.stop()
        self.lives += 1
        self.server = start(self.tokenizer, ScriptedModel(self.tokenizer, tells), **stub, settings={
            "kv_disk_dir": self.folder / "kv", "ctx": CTX, "trace": self._trace, "trace_format": "jsonl"})
        return self.server

    def stop(self):
        if self.server is not None:
            stop(self.server)
            self.server = None

    def turns(self):
        """(request, cache, finish) records of each request with tools in this life of the server, in order."""
        by_request = {}
        for line in self._trace.read_text("utf-8").splitlines():
            record = json.loads(line)
            by_request.setdefault(record["request"], {})[record["type"]] = record
        turns = [(told["request"], told["cache"], told["finish"]) for told in by_request.values() if "finish" in told]
        return [turn for turn in turns if turn[0]["tools"]]

    @property
    def _trace(self):
        return self.folder / f"trace-{self.lives}.jsonl"


@pytest.fixture
def house(v4_tokenizer, tmp_path):
    """A running server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS4MLX_HOME", str(tmp_path / "home"))
        house = House(v4_tokenizer, tmp_path)
        house.restart()
        yield house
        house.stop()
