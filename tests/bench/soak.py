"""A server under random clients for a while: does its memory stay flat, and is every answer right?

    python tests/bench/soak.py [--minutes 10] [--engine stub] [--model tiny] [--slots 4] [--clients 12] [--seed 0]

Starts `ds4mlx serve` on a free port of 127.0.0.1, with a cache directory that is too small for all. Clients of the four
APIs hold conversations of several turns, stream or not, leave in the middle, are cancelled by id, forget what they said
and begin anew. The scripted engine repeats the user's last message, so that each answer is known.

Prints a line every ten seconds. Exits 1 when an answer is wrong, a request fails that was not given up, requests are
left over, the server does not end when told to, or it has grown: the median of its resident memory in the last quarter
of the time is more than a tenth and --slack-mib above that of the second quarter, or the engine's arrays or the open
files or threads are. MLX keeps freed buffers, up to what a chunk takes to work in: without --slack-mib, 24 MiB for the
scripted engine, and the 800 that the tiny model's buffers stay below for others.
"""
import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

SLACK_SHARE, SLACK_MIB, MLX_SLACK_MIB = 0.1, 24.0, 800.0
VARIANTS = 4
WORDS = "the sea is wide and a small boat goes over it by night when nobody looks for it at all".split()
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Use:
    """What the server takes at one moment. arrays: of the engine."""
    at_s: float
    resident_mib: float
    arrays_mib: float
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int, stats: dict, began: float) -> "Use":
        """From /proc; elsewhere from ps, without files and threads."""
        at, status = time.monotonic() - began, Path(f"/proc/{pid}/status")
        arrays = (stats.get("memory") or {}).get("active_bytes", 0) / (1 << 20)
        if not status.exists():
            kib = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, check=True).stdout
            return cls(at, int(kib) / 1024, arrays, 0, 0)
        facts = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
        return cls(at, int(facts["VmRSS"].split()[0]) / 1024, arrays, len(os.listdir(f"/proc/{pid}/fd")),
                   int(facts["Threads"]))


@dataclass(slots=True)
class Tally:
    """What became of all requests. faults: in words."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, outcome: str, fault: str = "") -> None:
        with self.lock:
            self.counts[outcome] += 1
            if fault:
                self.faults.append(fault)


# ---- the four APIs: path, body, and the answer's text in a whole response or in an event

def _chat(messages: list[Message], tokens: int) -> dict[str, object]:
    return {"messages": messages, "max_tokens": tokens, "thinking": False}


def _responses(messages: list[Message], tokens: int) -> dict[str, object]:
    return {"input": messages, "max_output_tokens": tokens, "reasoning": {"effort": "none"}}


def _messages(messages: list[Message], tokens: int) -> dict[str, object]:
    return {"messages": messages, "max_tokens": tokens, "thinking": {"type": "disabled"}}


def _completions(messages: list[Message], tokens: int) -> dict[str, object]:
    return {"prompt": messages[-1]["content"], "max_tokens": tokens, "thinking": False}     # it knows no history


PATHS = {"/v1/chat/completions": _chat, "/v1/completions": _completions, "/v1/messages": _messages,
         "/v1/responses": _responses}


def text_of(path: str, whole: dict) -> str:
    if path == "/v1/chat/completions":
        return whole["choices"][0]["message"]["content"]
    if path == "/v1/completions":
        return whole["choices"][0]["text"]
    parts = whole["content"] if path == "/v1/messages" else \
        [part for item in whole["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part.get("text", "") for part in parts)


def text_of_event(path: str, event: dict) -> str:
    if "error" in event and event["error"]:
        raise ValueError(f"error in the stream: {event['error']}")
    if path == "/v1/chat/completions":
        return "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
    if path == "/v1/completions":
        return "".join(choice["text"] for choice in event.get("choices", ()))
    if event.get("type") == "response.output_text.delta":
        return event["delta"]
    delta = event.get("delta") if event.get("type") == "content_block_delta" else None
    return delta.get("text", "") if delta else ""


# ---- a client

class Client:
    """Holds one conversation after the other until `until`, seconds of the monotonic clock."""

    def __init__(self, port: int, seed: str, until: float, tally: Tally, repeats: bool) -> None:
        self._port, self._draw, self._until = port, random.Random(seed), until
        self._tally, self._repeats = tally, repeats

    def run(self) -> None:
        while time.monotonic() < self._until:
            path, system = self._draw.choice(list(PATHS)), self._words(self._draw.choice((0, 40, 400)))
            said: list[Message] = []
            for _ in range(self._draw.randrange(1, 7)):
                question = self._words(self._draw.randrange(2, 60))
                said.append({"role": "user", "content": question if said else f"{system} {question}".strip()})
                if (answer := self._turn(path, said)) is None or time.monotonic() >= self._until:
                    break
                said.append({"role": "assistant", "content": answer})
                if self._draw.random() < 0.1:
                    said = said[:2 * self._draw.randrange(1, len(said) // 2 + 1)]     # goes back to an earlier turn

    def _words(self, count: int) -> str:
        """One of VARIANTS texts of so many words: the server remembers how texts are encoded, up to 64 MiB of them, and
        new ones would fill that for hours. Long ones are shared by all."""
        draw = random.Random(count * VARIANTS + (self._draw.randrange(VARIANTS) if count < 100 else 0))
        return " ".join(draw.choice(WORDS) for _ in range(count))

    def _turn(self, path: str, said: list[Message]) -> str | None:
        """The answer; None when the conversation is over by it."""
        draw, streams = self._draw, self._draw.random() < 0.7
        leaves = draw.randrange(0, 600) if streams and draw.random() < 0.15 else None
        by_id = streams and leaves is None and draw.random() < 0.05
        limit = draw.choice((5, 400, 400, 400))
        try:
            status, answer = self._ask(path, PATHS[path](said, limit) | {"stream": streams}, leaves, by_id)
        except (OSError, ValueError, KeyError, http.client.HTTPException) as fault:
            if not by_id:
                self._tally.add("failed", f"{path}: {type(fault).__name__}: {fault}")
            else:
                self._tally.add("cancelled by id")
            return None
        if status != 200 or leaves is not None or by_id:
            self._tally.add({429: "queue full"}.get(status, "left" if status == 200 else "failed"),
                            "" if status in (200, 429) else f"{path}: status {status}: {answer[:200]}")
            return None
        right = not self._repeats or said[-1]["content"].startswith(answer) and (limit == 5 or answer)
        self._tally.add("answered" if right else "wrong", "" if right else f"{path}: {answer!r} to {said[-1]!r}")
        return answer if answer and limit > 5 else None

    def _ask(self, path: str, body: dict[str, object], leaves: int | None, by_id: bool) -> tuple[int, str]:
        """Status and text. leaves: bytes after which the client goes away."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            if by_id:
                self._cancel(response.headers["x-request-id"])
            if leaves is not None:
                return response.status, response.read(leaves).decode("utf-8", "replace")
            data = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            return response.status, data
        if not body["stream"]:
            return 200, text_of(path, json.loads(data))
        events = [line[6:] for line in data.splitlines() if line.startswith("data: ") and line != "data: [DONE]"]
        return 200, "".join(text_of_event(path, json.loads(event)) for event in events)

    def _cancel(self, id: str) -> None:
        other = http.client.HTTPConnection("127.0.0.1", self._port, timeout=120)
        other.request("POST", f"/admin/requests/{id}/cancel")
        other.getresponse().read()
        other.close()


# ---- the server

def serve(options: argparse.Namespace, folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A running server and its port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "ds4mlx", "serve", "--model", options.model, "--engine", options.engine, "--port", "0",
         "--ctx", "4096", "--batched-session", str(options.slots), "--kv-disk-dir", str(folder / "kv"),
         "--kv-disk-space-mb", "32", "--responses-store", "16", "--log-level", "warning", "--max-queue", "32"],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"DS4MLX_HOME": str(folder)})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("listening on "):
            return process, int(line.rsplit(":", 1)[1])
    raise SystemExit("the server did not start")


def get(port: int, path: str) -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", path)
    found = json.loads(connection.getresponse().read())
    connection.close()
    return found


def watched(process: subprocess.Popen[str], port: int, until: float, began: float,
            tally: Tally) -> list[Use]:
    """What the server takes, every two seconds."""
    seen: list[Use] = []
    while time.monotonic() < until and process.poll() is None:
        time.sleep(2)
        now = get(port, "/stats")
        seen.append(use := Use.of(process.pid, now, began))
        if len(seen) % 5 == 0:
            counts = ", ".join(f"{n} {name}" for name, n in sorted(tally.counts.items()))
            print(f"{use.at_s:6.0f} s  {use.resident_mib:7.1f} MiB, arrays {use.arrays_mib:6.1f}  "
                  f"{use.files:3d} files  {use.threads:2d} threads  "
                  f"{now['active']} active  {now['queued']} queued  {counts}", flush=True)
    return seen


def growth(seen: list[Use], slack_mib: float) -> list[str]:
    """What grew between the second quarter of the time and the last."""
    quarter, found = max(1, len(seen) // 4), []
    before, after = seen[quarter:2 * quarter], seen[-quarter:]
    for name, slack in (("resident_mib", slack_mib), ("arrays_mib", SLACK_MIB)):
        was, now = (median(getattr(use, name) for use in part) for part in (before, after))
        found += [f"{name} grew from {was:.1f} to {now:.1f}"] if now - was > max(SLACK_SHARE * was, slack) else []
        print(f"{name}: median {was:.1f} in the second quarter, {now:.1f} in the last")
    for name in ("files", "threads"):
        was, now = (max(getattr(use, name) for use in part) for part in (before, after))
        found += [f"{name} grew from {was} to {now}"] if now > 1.5 * was + 8 else []
    return found


def ended(process: subprocess.Popen[str], port: int) -> list[str]:
    """What is wrong with a server that nobody asks any more, and with its end."""
    deadline = time.monotonic() + 30
    while (now := get(port, "/health"))["active"] + now["queued"] and time.monotonic() < deadline:
        time.sleep(0.2)
    faults = [f"left over: {now}"] if now["active"] + now["queued"] else []
    process.send_signal(signal.SIGINT)
    try:
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        return [*faults, "the server did not end within 60 s"]
    return [*faults, f"the server ended with {code}"] if code else faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--engine", default="stub")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--slack-mib", type=float, help="growth of resident memory that is allowed")
    options = parser.parse_args()
    slack_mib = options.slack_mib or (SLACK_MIB if options.engine == "stub" else MLX_SLACK_MIB)
    tally, began = Tally(), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        process, port = serve(options, Path(folder))
        try:
            until = time.monotonic() + 60 * options.minutes
            clients = [Client(port, f"{options.seed} {n}", until, tally, options.engine == "stub")
                       for n in range(options.clients)]
            threads = [threading.Thread(target=client.run) for client in clients]
            for thread in threads:
                thread.start()
            seen = watched(process, port, until, began, tally)
            for thread in threads:
                thread.join(180)
            faults = [*tally.faults, *growth(seen, slack_mib), *ended(process, port)]
        finally:
            process.kill()
    print(f"{sum(tally.counts.values())} requests: {dict(sorted(tally.counts.items()))}; {len(faults)} faults")
    print(*faults[:20], sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
