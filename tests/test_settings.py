"""Settings: flags over environment over file over default, and an error that names what is wrong."""
import os
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

from ds4mlx.config import BOUNDS, Settings, cache_dir, color_wanted, state_dir, suggest
from ds4mlx.errors import UsageError


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "settings.toml"
        path.write_text(text, "utf-8")
        return str(path)
    return write


def test_flags_win_over_environment_over_file_over_default(toml):
    file = toml("temp = 0.1\ntop_p = 0.2\nmin-p = 0.3\n")
    environment = {"DS4MLX_TEMP": "0.4", "DS4MLX_TOP_P": "0.5"}
    loaded = Settings.load("run", {"config": file, "temp": "0.6", "ctx": None}, environment)
    assert (loaded.temp, loaded.top_p, loaded.min_p, loaded.ctx) == (0.6, 0.5, 0.3, Settings().ctx)


def test_a_section_of_a_file_counts_for_its_command_and_over_the_top(toml):
    flags = {"config": toml("ctx = 100\npower = 50\n[serve]\nctx = 200\n[run]\nctx = 300\n")}
    assert [Settings.load(command, flags, {}).ctx for command in ("serve", "run", "logits")] == [200, 300, 100]
    assert Settings.load("serve", flags, {}).power == 50


def test_the_environment_may_name_the_file(toml):
    assert Settings.load("run", {}, {"DS4MLX_CONFIG": toml("seed = 7")}).seed == 7


@pytest.mark.parametrize("name, text, value", [
    ("model", "x.gguf", Path("x.gguf")), ("ctx", "4096", 4096), ("memory_limit_gb", "1.5", 1.5), ("cors", "yes", True),
    ("default_thinking", "off", False), ("kv_round", "none", "none"), ("default_effort", "max", ("max",)),
    ("allow_host", "a.example,b.example", ("a.example", "b.example")), ("api_key", "s3cret", "s3cret"),
    ("lock", "off", False), ("sse_keepalive_seconds", "0", 0.0), ("seed", str(2**64 - 1), 2**64 - 1)])
def test_each_kind_of_setting_is_read_from_text(name, text, value):
    assert getattr(Settings.load("serve", {}, {f"DS4MLX_{name.upper()}": text}), name) == value


def other_text(name):
    """A value that is not the default of a setting, as one writes it."""
    kind, default = Settings.__annotations__[name], getattr(Settings(), name)
    if name == "default_effort":
        return "messages=max"
    if isinstance(default, bool):
        return "off" if default else "on"
    if choices := [choice for part in (kind, *get_args(kind)) if get_origin(part) is Literal
                   for choice in get_args(part)]:
        return next(choice for choice in choices if choice != default)
    if name in BOUNDS:
        return str(256 if name in ("prefill_chunk", "mixed_prefill_quantum", "kv_cache_min_tokens") else
                   next(bound for bound in map(int, BOUNDS[name][::-1]) if bound != default))
    return "some-text"


@pytest.mark.parametrize("name", Settings.__slots__)
def test_every_setting_is_the_same_from_flag_environment_and_file(toml, name):
    text, several = other_text(name), isinstance(getattr(Settings(), name), tuple)
    written = {"on": "true", "off": "false"}.get(text, text if name in BOUNDS else f"'{text}'")
    file = {"config": toml(f"{name.replace('_', '-')} = {[text] if several else written}")}
    loaded = [Settings.load("serve", flags, environment) for flags, environment in (
        ({name: [text] if several else text}, {}), ({}, {f"DS4MLX_{name.upper()}": text}), (file, {}))]
    assert loaded[0] != Settings() and loaded == [loaded[0]] * 3


@pytest.mark.parametrize("name, text, needed", [
    ("ctx", "many", "whole number"), ("ctx", "0", "from 1"), ("ctx", "1.5", "whole number"), ("temp", "nan", "number"),
    ("temp", "inf", "number"), ("top_p", "1.1", "from 0 to 1"), ("prefill_chunk", "100", "128"),
    ("port", "70000", "65535"),
    ("batched_session", "17", "from 1 to 16"), ("mixed_prefill_quantum", "200", "multiple of 128"),
    ("prefill_chunk", "200", "multiple of 128"), ("kv_round", "half", "official, none"), ("cors", "maybe", "on or off"),
    ("seed", "-1", "from 0"), ("ctx", "9" * 5000, "whole number")])
def test_a_wrong_value_is_refused_with_its_name_and_what_is_needed(name, text, needed):
    for flags, environment, told in (({name: text}, {}, "--" + name.replace("_", "-")),
                                     ({}, {f"DS4MLX_{name.upper()}": text}, f"DS4MLX_{name.upper()}")):
        with pytest.raises(UsageError, match=told) as refused:
            Settings.load("serve", flags, environment)
        assert needed in str(refused.value) and len(str(refused.value)) < 250


@pytest.mark.parametrize("content, told", [
    ("ctx = 'many'", "ctx"), ("ctx = true", "ctx"), ("ctx = 1.0", "ctx"), ("cors = 1", "cors"), ("host = 3", "host"),
    ("allow_host = 'one'", "allow_host"), ("contxt = 5", "contxt"), ("[sreve]\nport = 1", "sreve"),
    ("[run]\nprt = 1", r"\[run\] prt"), ("ctx = [", "not TOML"), ("model = ''", "model"), ("[run.ctx]\na=1", "ctx")])
def test_a_file_is_refused_by_key(toml, content, told):
    with pytest.raises(UsageError, match=told):
        Settings.load("run", {"config": toml(content)}, {})


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no-such.toml"):
        Settings.load("run", {"config": str(tmp_path / "no-such.toml")}, {})


@pytest.mark.parametrize("text, lock", [("no-lock = true", False), ("no_lock = false", True), ("lock = false", False)])
def test_the_lock_is_turned_off_by_its_option_in_a_file_too(toml, text, lock):
    assert Settings.load("run", {"config": toml(text)}, {}).lock is lock


def test_no_message_shows_the_key(toml):
    with pytest.raises(UsageError) as refused:
        Settings.load("serve", {"config": toml("api-key = 31415")}, {})
    assert "api-key" in str(refused.value) and "31415" not in str(refused.value)
    assert "31415" not in repr(Settings(api_key="31415"))


def test_an_effort_for_one_api_goes_before_that_for_all_and_the_last_word_counts():
    settings = Settings.load("serve", {}, {"DS4MLX_DEFAULT_EFFORT": "low,messages=high,messages=max"})
    assert [settings.effort(api) for api in ("chat", "messages", "completions")] == ["low", "max", "low"]
    assert Settings().effort("chat") is None


@pytest.mark.parametrize("wrong", ["hard", "mesages=max", "messages=", "max,hard", "max=messages"])
def test_an_effort_that_is_none_is_refused(wrong):
    with pytest.raises(UsageError, match="DS4MLX_DEFAULT_EFFORT .* need low, high or max, or such as messages=max"):
        Settings.load("serve", {}, {"DS4MLX_DEFAULT_EFFORT": wrong})


@pytest.mark.parametrize("most, least, right", [(0, 512, True), (512, 512, True), (511, 512, False)])
def test_no_beginning_is_too_short_and_too_long_for_a_file_at_once(most, least, right):
    flags = {"kv_cache_cold_max_tokens": most, "kv_cache_min_tokens": least}
    if right:
        assert Settings.load("serve", flags, {}).kv_cache_cold_max_tokens == most
    else:
        with pytest.raises(UsageError, match="cold-max-tokens is '511', need 0 or at least the 512 of --kv-cache-min"):
            Settings.load("serve", flags, {})


def test_an_empty_variable_is_as_good_as_none():
    assert Settings.load("run", {}, {"DS4MLX_CTX": "", "DS4MLX_MODEL": ""}) == Settings()


def test_each_number_has_bounds_that_hold_its_default():
    numbers = {name: value for name in Settings.__slots__ if type(value := getattr(Settings(), name)) in (int, float)}
    assert numbers.keys() <= BOUNDS.keys()
    assert all(low <= numbers[name] <= high for name, (low, high) in BOUNDS.items() if name in numbers)


def test_directories_follow_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("DS4MLX_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert (state_dir(), cache_dir()) == (tmp_path / "home", tmp_path / "ds4mlx")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    assert cache_dir().is_absolute()


def test_a_user_without_a_home_directory_is_told_to_name_one(monkeypatch):
    for name in ("HOME", "DS4MLX_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)  # of no user
    for directory in (state_dir, cache_dir):
        with pytest.raises(UsageError, match="set HOME"):
            directory()


def test_color_is_for_terminals_and_no_color_turns_it_off(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert color_wanted("auto", True) and not color_wanted("auto", False) and color_wanted("always", False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not color_wanted("auto", True)


def test_a_dumb_terminal_is_not_coloured(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not color_wanted("auto", True) and color_wanted("always", True)


def test_what_is_suggested_to_a_library_leaves_what_the_user_has_set(monkeypatch):
    monkeypatch.setenv("LIBRARY_GRAPHS", "4")
    monkeypatch.delenv("LIBRARY_BYTES", raising=False)
    suggest({"LIBRARY_GRAPHS": "100", "LIBRARY_BYTES": "7"})
    assert (os.environ["LIBRARY_GRAPHS"], os.environ.pop("LIBRARY_BYTES")) == ("4", "7")
