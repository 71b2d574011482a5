"""`ds4mlx cache` on directories of the toy model's states."""
import json
import subprocess
import sys
import time
from io import StringIO

import pytest
from toy_files import IDENTITY
from toy_store import history, key_of, load, open_store, same_state, save

from ds4mlx.cli.cache import ACTIONS
from ds4mlx.sessions.directory import CacheDirectory
from ds4mlx.sessions.format import usage_writes
from ds4mlx.sessions.toolmap import ToolBlock

SYSTEM = history(5000, seed=1)
ONE, OTHER = history(7000, seed=2, after=SYSTEM), history(9000, seed=3, after=SYSTEM)


@pytest.fixture
def store(tmp_path):
    """A store of two conversations that begin alike, its server still running."""
    running = open_store(tmp_path / "kv")
    save(running, ONE, "cold", aliases=((b"<user>as seen", "thinking-visible"),))
    save(running, OTHER, "evict")
    yield running
    running.close()


@pytest.fixture
def cache(ds4mlx, store):
    """cache(action, *options): the command on the store's directory."""
    return lambda *arguments: ds4mlx("cache", *arguments, "--kv-disk-dir", store.path)


def listed(cache):
    return {state["name"]: state for state in json.loads(cache("ls", "--json").out)["states"]}


def file_of(store, tokens):
    return store.path / store.find(key_of(tokens)).candidates[0].name


def flip(path, at=-300):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_a_state_is_listed_with_its_size_its_use_and_its_model(cache, store):
    assert load(store, ONE)
    state = listed(cache)[file_of(store, ONE).name]
    assert (state["tokens"], state["reason"], state["hits"], state["aliases"]) == (7000, "cold", 1, 1)
    assert state["base_fp"] == IDENTITY.base_fp and state["text_bytes"] == len(key_of(ONE))


def test_shared_segments_are_counted_once(cache, store):
    result = json.loads(cache("ls", "--json").out)
    assert [(state["segments"], state["shared_segments"]) for state in result["states"]] in ([(4, 2), (3, 2)],
                                                                                            [(3, 2), (4, 2)])
    assert result["segments"]["count"] == 5
    assert result["total_bytes"] == pytest.approx(sum(s["size_bytes"] for s in result["states"]), abs=2)  # rounding
    assert result["total_bytes"] == sum(path.stat().st_size for path in store.path.glob("*.kv?"))


def test_the_list_says_who_goes_next(cache, store):
    order = sorted(listed(cache).values(), key=lambda state: state["evicted_after"])
    assert [state["reason"] for state in order] == ["evict", "cold"]
    assert cache("prune", "--to-mb", "0").code == 0 and listed(cache) == {}


def test_what_a_server_takes_from_its_model_is_worked_out_from_a_file(store):
    from ds4mlx.sessions.survey import fixed_bytes
    assert fixed_bytes(store._directory, store._index) == store._room.fixed_bytes


def test_a_pipe_gets_aligned_lines(cache):
    lines = cache("ls").out.splitlines()
    assert lines[0].startswith("States in ") and lines[1].split()[:4] == ["state", "key", "reason", "tokens"]
    assert {line.split()[2] for line in lines[2:4]} == {"cold", "evict"} and len({len(line) for line in lines[2:4]}) < 3
    assert any(line.startswith("segments ") for line in lines)


def test_a_terminal_gets_tables(cache, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert "─" in cache("ls").out


def test_an_empty_cache_is_no_error(ds4mlx, tmp_path):
    open_store(tmp_path / "kv").close()
    assert [ds4mlx("cache", action, tmp_path / "kv").code for action in ("ls", "verify")] == [0, 0]


def test_a_state_is_shown_by_the_beginning_of_its_name_without_its_text(cache, store):
    name = file_of(store, ONE).name
    result = cache("show", name[:6])
    assert result.code == 0 and name in result.out and "7,000 of a context of" in result.out
    assert key_of(ONE).decode()[:40] not in result.out
    assert json.loads(cache("show", name, "--json").out).keys().isdisjoint({"text", "key"})


def test_the_text_is_shown_when_asked_for(cache, store):
    name = file_of(store, ONE).name
    assert cache("show", name[:6], "--text").out.endswith(f"\n{key_of(ONE).decode()}\n")
    assert json.loads(cache("show", name, "--text", "--json").out)["text"] == key_of(ONE).decode()


def test_text_of_a_client_cannot_steer_the_terminal(cache, store):
    save(store, history(600), key=b"\x1b[2J\xff\xff<user>\n\tend")
    name = next(name for name, state in listed(cache).items() if state["tokens"] == 600)
    assert cache("show", name, "--text").out.endswith("\n\\x1b[2J\ufffd<user>\n\tend\n")


def test_the_ids_of_tool_calls_are_not_shown(cache, store):
    save(store, history(600), blocks=(ToolBlock(("call_secret",), "", "<calls/>", (1, 2)),))
    name = next(name for name, state in listed(cache).items() if state["tool_calls"] == 1)
    shown = [cache("show", name).out, cache("show", name, "--json").out, cache("ls").out]
    assert not any("secret" in text for text in shown) and "1 that can be repeated" in shown[0]


@pytest.mark.parametrize("prefix, told", [("", "2 states"), ("zz", "no states")])
def test_a_prefix_of_several_states_or_none_is_misuse(cache, prefix, told):
    result = cache("show", prefix)
    assert result.code == 2 and told in result.err and result.out == ""


def test_sound_files_are_verified(cache):
    result = cache("verify")
    assert (result.code, result.err) == (0, "") and result.out.startswith("8 files, ") and "none bad" in result.out


@pytest.mark.parametrize("at", [5, 60, -300, -10])
def test_a_flipped_bit_is_found_and_the_file_left_in_place(cache, store, at):
    head = file_of(store, ONE)
    flip(head, at)
    result = cache("verify")
    assert result.code == 1 and head.name in result.out and "1 bad" in result.out and head.exists()


def test_a_bad_segment_names_the_states_that_need_it(cache, store):
    segment = max(store.path.glob("*.kvs"), key=lambda path: path.stat().st_mtime_ns)  # the last of the other's
    flip(segment)
    lines = cache("verify").out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == [segment.name, file_of(store, OTHER).name]


def test_missing_files_are_found(cache, store):
    file_of(store, OTHER).rename(store.path / "elsewhere")
    file_of(store, ONE).unlink()
    found = json.loads(cache("verify", "--json").out)["files"]
    assert [(file["kind"], file["why"].split()[-1]) for file in found if file["verdict"] == "bad"] == [
        ("alias", "missing")]


def test_a_file_under_another_name_is_bad(cache, store):
    head = file_of(store, ONE)
    head.rename(head.with_name("0" * 40 + head.name[40:]))
    assert "not the SHA-1 of its key" in cache("verify").out


def test_states_of_other_versions_are_no_fault(cache, store):
    flip(file_of(store, ONE), 3)   # the version
    result = cache("verify")
    assert result.code == 0 and "foreign" in result.out and "none bad" in result.out


def test_pruning_keeps_what_is_worth_most(cache, store):
    total = json.loads(cache("ls", "--json").out)["total_bytes"]
    result = cache("prune", "--to-mb", "0")
    assert result.out == f"deleted 2 states, {total / 1e3:.1f} kB; 0 states, 0.0 kB, are left\n"
    assert not list(store.path.glob("*.kv?"))


def test_pruning_by_age_deletes_what_was_not_used(cache, store):
    for at, data in usage_writes(0, int(time.time()) - 8 * 86400):
        with open(file_of(store, ONE), "r+b") as file:
            file.seek(at)
            file.write(data)
    assert cache("prune", "--older-than", "9d").out.startswith("deleted 0 states")
    assert cache("prune", "--older-than", "7d").out.startswith("deleted 1 states")
    assert same_state(load(store, OTHER), OTHER) and load(store, ONE) is None


@pytest.mark.parametrize("options", [(), ("--to-mb", "-1"), ("--to-mb", "x"), ("--older-than", "7"),
                                     ("--older-than", "d"), ("--older-than", "7 days")])
def test_pruning_without_a_clear_order_is_misuse(cache, options):
    result = cache("prune", *options)
    assert result.code == 2 and len(listed(cache)) == 2


def test_clearing_deletes_all_files_of_the_cache_and_no_others(cache, store):
    (store.path / "notes.txt").write_text("mine")
    assert cache("clear", "--yes").out.endswith("0 states, 0.0 kB, are left\n")
    assert {path.name for path in store.path.iterdir()} == {".lock", "CACHEDIR.TAG", "quarantine", "notes.txt"}


@pytest.mark.parametrize("answer, left", [("y\n", 0), ("n\n", 2), ("", 2)])
def test_clearing_asks(cache, monkeypatch, answer, left):
    monkeypatch.setattr("sys.stdin", StringIO(answer))
    result = cache("clear")
    assert result.code == (0 if not left else 1) and result.err.startswith("delete 2 states, ")
    assert len(listed(cache)) == left


def test_a_server_goes_on_after_its_states_are_cleared(cache, store):
    cache("clear", "--yes")
    assert load(store, ONE) is None
    assert save(store, ONE) == 1 and same_state(load(store, ONE), ONE)


def test_while_a_server_decides_what_goes_nothing_is_deleted(cache, store, monkeypatch):
    monkeypatch.setitem(CacheDirectory.__init__.__kwdefaults__, "lock_wait_s", 0.05)
    with store._directory.lock():
        pruned, cleared = cache("prune", "--to-mb", "0"), cache("clear", "--yes")
        assert len(listed(cache)) == 2
    assert pruned.code == cleared.code == 1 and "locked by another process" in pruned.err


@pytest.mark.parametrize("action", [["ls"], ["show", "a"], ["verify"], ["prune", "--to-mb", "1"], ["clear", "--yes"]])
def test_a_directory_of_other_things_is_not_touched(ds4mlx, tmp_path, action):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "CACHEDIR.TAG").write_text("Signature: of another program")
    result = ds4mlx("cache", *action, tmp_path / "home")
    assert result.code == 1 and "no server has kept states here" in result.err
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["CACHEDIR.TAG"]


def test_the_environment_may_name_the_directory(ds4mlx, store, monkeypatch):
    monkeypatch.setenv("DS4MLX_KV_DISK_DIR", str(store.path))
    assert ds4mlx("cache", "verify").code == 0


@pytest.mark.parametrize("arguments", [[], ["ls"], ["nonsense"], ["ls", "a", "--kv-disk-dir", "b"], ["show"]])
def test_misuse_is_one_line(ds4mlx, arguments):
    result = ds4mlx("cache", *arguments)
    assert result.code == 2 and result.out == "" and result.err.startswith("ds4mlx cache")


def test_every_action_has_help(ds4mlx):
    assert all(ds4mlx("cache", action, "--help").out.startswith(f"usage: ds4mlx cache {action}") for action in ACTIONS)


def test_no_mlx_and_no_model_is_needed(store):
    code = ("import sys\nsys.modules['mlx'] = None\nfrom ds4mlx.cli.main import main\n"
            f"sys.exit(main(['cache', 'ls', {str(store.path)!r}]))")
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, timeout=60).returncode == 0
