"""What `ds4mlx doctor` looks at: whether a model will run on this machine, and what is in the way. Loads no weights."""
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ds4mlx.cli.tables import size
from ds4mlx.errors import Ds4Error, UsageError

if TYPE_CHECKING:
    from ds4mlx.config import Settings
    from ds4mlx.engine.protocol import MemoryPlan

Verdict = Literal["ok", "note", "wrong"]
CLIENTS = ("claude", "codex", "opencode", "pi")
BLOCK, MOST_READ, READ_S = 8 << 20, 512 << 20, 2.0
LEAST_READ = 64 << 20       # less says nothing of a disk
F_NOCACHE = 48              # of macOS' fcntl, which Python does not name
CLOCK_SLACK_S = 300         # a file that came over a network may be from a clock that is a little ahead
SLOW_GB_S = 1.0             # a model of 87 GB would take minutes to be read


@dataclass(frozen=True, slots=True)
class Finding:
    """`told`: what was found and, unless it is well, what to do."""
    what: str
    verdict: Verdict
    told: str


def examine(settings: "Settings", sha256: str | None = None) -> Iterator[Finding]:
    """One finding after the other, each as soon as it is known. What fails is a finding.

    sha256: what the model file's sum should be; "": it is to be shown. Raises UsageError for one that is none.
    """
    from ds4mlx.cli.model import resolve_model
    if sha256 and not re.fullmatch("[0-9a-fA-F]{64}", sha256):
        raise UsageError(f"--sha256 is {sha256[:80]!r}, need 64 hexadecimal digits, or nothing to see the sum")
    missing = None
    try:
        settings = replace(settings, model=resolve_model(settings))
    except Ds4Error as fault:
        missing = fault
    for what, look in EXAMINATIONS.items():
        if missing and look in (_fit, _disk):
            continue
        try:
            if missing and look is _model:
                raise missing
            verdict, told = look(settings)
        except Ds4Error as fault:
            verdict, told = "wrong", str(fault)
        except OSError as fault:
            verdict, told = "wrong", f"{fault.filename or what}: {fault.strerror}"
        yield Finding(what, verdict, told)
    if sha256 is not None and settings.model and not missing:
        yield _sum(settings.model, sha256.lower())


Told = tuple[Verdict, str]


def _python(_: "Settings") -> Told:
    from ds4mlx import __version__
    return "ok", f"ds4mlx {__version__} on Python {sys.version.split()[0]}, {sys.executable}"


def _device(_: "Settings") -> Told:
    try:
        from ds4mlx.engine.mlx_kernels import has_metal, machine
    except ImportError as fault:
        return "wrong", f"MLX cannot be imported ({fault}); install ds4mlx again in this Python"
    here = machine("metal-emulated")    # which does not measure
    told = f"{here.device}, MLX {here.mlx}, {here.system}"
    if sys.platform == "darwin" and not has_metal():
        return "wrong", f"{told}: no Metal device; ds4mlx needs Apple silicon, and a Python that is not under Rosetta"
    return "ok", told


def _memory(settings: "Settings") -> Told:
    from ds4mlx.engine.mlx_memory import limit_bytes
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    told = f"{size(total)}, of which a model may take {size(limit_bytes(settings.memory_limit_gb))}"
    return "ok", told + (f"; iogpu.wired_limit_mb is {limit}" if (limit := _wired_limit()) is not None else "")


def _wired_limit() -> str | None:
    """macOS' own limit of what a GPU may hold, in MiB, "0" being its default; None elsewhere."""
    import subprocess
    if sys.platform != "darwin":
        return None
    asked = subprocess.run(["/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"], capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else None


def _model(settings: "Settings") -> Told:
    from ds4mlx.cli.inspect import summarize
    from ds4mlx.gguf.reader import GGUF
    with GGUF.open(settings.model) as file:
        found = summarize(file)
    largest = found.families[0]
    return "ok", (f"{settings.model}: {found.name or 'no name'}, {size(found.file_bytes)}, every tensor in place; "
                  f"{largest.name} in {' '.join(largest.kinds)}")


def _sum(path: Path, wanted: str) -> Finding:
    """Minutes for a large model."""
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as fault:
        return Finding("sha256", "wrong", f"{path}: {fault.strerror}; give the path of a GGUF model")
    if wanted and found != wanted:
        return Finding("sha256", "wrong", f"{found}, need {wanted}; remove the file and fetch it again: ./download.sh")
    return Finding("sha256", "ok", found if wanted else f"{found}; compare it with that of who published the file")


def _fit(settings: "Settings") -> Told:
    """By the plan that the engine would make."""
    from ds4mlx.engine import mlx_memory
    from ds4mlx.gguf.reader import GGUF
    from ds4mlx.models.registry import family_of
    with GGUF.open(settings.model) as file:
        config = family_of(file.metadata).role("names").validate(file)
        limit = mlx_memory.limit_bytes(settings.memory_limit_gb)

        def plan_of(context: int, sessions: int) -> "MemoryPlan":
            return mlx_memory.plan(file, config, context, sessions, settings.kv_round == "official",
                                   settings.kv_rewind_points, settings.prefill_chunk, limit)

        plan = plan_of(settings.ctx, settings.batched_session)
        try:
            mlx_memory.require(plan, settings.ctx, plan_of)
        except Ds4Error as fault:
            raised = f"; sudo sysctl iogpu.wired_limit_mb={plan.total_bytes >> 20} lets a Mac's GPU hold that, if " \
                     "the machine has it" if sys.platform == "darwin" else ""
            return "wrong", f"{fault}{raised}"
    return "ok", (f"{settings.batched_session} x {settings.ctx:,} tokens take {size(plan.total_bytes)}: weights "
                  f"{size(plan.weights_bytes)}, each state {size(plan.session_bytes)}, "
                  f"{size(plan.scratch_bytes)} to work in")


def _disk(settings: "Settings") -> Told:
    speed = read_gb_s(settings.model)
    room = shutil.disk_usage(_existing(settings.kv_disk_dir or Path.cwd())).free
    kept = settings.kv_disk_space_mb << 20 if settings.kv_disk_dir else 0
    told = f"the model is read at {speed:.1f} GB/s" if speed else "the model is too small to time"
    told += f", {size(room)} free"
    if kept > room:
        return "note", f"{told}, and --kv-disk-space-mb lets states take {size(kept)}; make room, or lower it"
    if speed is not None and speed < SLOW_GB_S:
        return "note", f"{told}; loading will take long: put the model on an internal disk"
    return "ok", told


def _existing(path: Path) -> Path:
    """The folder, or the one that it would be made in."""
    path = path.expanduser().absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def read_gb_s(path: Path) -> float | None:
    """How fast a file's bytes come from its disk rather than from memory; None for one that is too small to tell."""
    with path.open("rb", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        if length < LEAST_READ:
            return None
        _uncached(file.fileno())
        began, done = time.perf_counter(), 0
        while done < min(length, MOST_READ) and time.perf_counter() - began < READ_S:
            done += len(file.read(BLOCK))
    return done / (time.perf_counter() - began) / 1e9


def _uncached(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    elif sys.platform == "darwin":
        import fcntl
        fcntl.fcntl(descriptor, F_NOCACHE, 1)


def _state(settings: "Settings") -> Told:
    """The folder of locks, history and kept conversations, and whether a model is loaded."""
    from ds4mlx.config import state_dir
    folder = state_dir()
    if not folder.exists():
        return "ok", f"{folder} is made when it is needed"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "wrong", f"{folder} cannot be written; set DS4MLX_HOME to a folder of yours"
    if folder.stat().st_mode & 0o077:
        return "note", f"{folder} can be read by others: chmod 700 {folder}"
    from ds4mlx.cli.model import engine_lock
    try:
        with engine_lock(replace(settings, lock=True), folder):
            return "ok", f"{folder} is private; no model is loaded"
    except Ds4Error as fault:
        return "note", str(fault)


def _clock(settings: "Settings") -> Told:
    """Ages of kept states and dates of files come from it; nobody outside is asked."""
    now = time.time()
    told = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))
    files = [path for path in (Path(__file__), settings.model) if path is not None and path.exists()]
    newest = max(files, key=lambda path: path.stat().st_mtime)
    ahead_s = newest.stat().st_mtime - now
    if ahead_s > CLOCK_SLACK_S:
        return "note", (f"{told}, but {newest} was written {ahead_s / 3600:,.1f} hours after that; set the clock, or "
                        "kept states count as too old or too new")
    return "ok", told


def _port(settings: "Settings") -> Told:
    from ds4mlx.cli.wire import server_address
    from ds4mlx.cli.wire_check import find_server
    from ds4mlx.server.listen import bind
    place = settings.host if settings.host.startswith("unix:") else f"{settings.host}:{settings.port}"
    try:
        bind(settings).close()
        return "ok", f"{place} is free"
    except Ds4Error as fault:
        refused = fault
    try:
        server = find_server(server_address(settings), settings.api_key)
    except Ds4Error:
        return "wrong", str(refused)
    return "ok", f"{place} is a ds4mlx server: {server.model}, context {server.context:,}"


def _clients(_: "Settings") -> Told:
    found = [f"{name} ({where})" for name in CLIENTS if (where := shutil.which(name))]
    return "ok", f"{', '.join(found)}; ds4mlx wire NAME sets one up" if found else "none of " + ", ".join(CLIENTS)


EXAMINATIONS: dict[str, Callable[["Settings"], Told]] = {
    "program": _python, "device": _device, "memory": _memory, "model": _model, "fit": _fit, "disk": _disk,
    "state": _state, "clock": _clock, "port": _port, "clients": _clients}
