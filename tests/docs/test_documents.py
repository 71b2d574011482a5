"""What pages show is what the code makes."""
import re
from io import BytesIO

import pytest
from document import blocks, text
from toy_files import arrays_in, bytes_of, golden_bytes, open_head

from ds4mlx.cli.wire_setup import CLIENTS, Endpoint
from ds4mlx.sessions import segment
from ds4mlx.sessions.format import head_image, read_head
from ds4mlx.sessions.header import REASONS, Header
from ds4mlx.sessions.integrity import Footer
from ds4mlx.sessions.policy import SaveRules

SERVER = Endpoint("http://127.0.0.1:8000", "deepseek-v4-flash", 131072, 393216)
CACHE = "docs/cache-format.md"
SIZES = {"u8": 1, "u32": 4, "u64": 8}


@pytest.mark.parametrize("page, language, client", [("docs/claude-code.md", "text", "claude"),
                                                    ("docs/agents.md", "toml", "codex")])
def test_the_set_up_of_a_client_is_what_wire_prints(page, language, client):
    assert CLIENTS[client].setup(SERVER) in blocks(page, language)


def test_the_pages_of_clients_tell_their_first_prompts():
    for client in CLIENTS.values():
        assert f"{client.first_prompt:,} tokens" in text("docs/claude-code.md") + text("docs/agents.md")


def table(heading):
    """(offset, bytes) of each field of a table of the cache's page."""
    rows = re.findall(r"^\| (\d+) \| (u\d+)(?:\[(\d+)\])? \|", text(CACHE).partition(heading)[2].partition("\n\n")[0],
                      re.MULTILINE)
    return [(int(at), SIZES[kind] * int(count or 1)) for at, kind, count in rows]


@pytest.mark.parametrize("heading, layout", [("| header, 48 bytes |", Header.LAYOUT),
                                             ("at the end of every file:\n\n", Footer.LAYOUT),
                                             ("| header, 32 bytes |", segment.HEADER)])
def test_the_tables_of_the_cache_s_files_give_every_byte(heading, layout):
    fields = table(heading)
    assert [at for at, _ in fields] == [sum(size for _, size in fields[:i]) for i in range(len(fields))]
    assert sum(size for _, size in fields) == layout.size


def test_the_example_of_a_cache_file_is_what_is_written():
    stored = read_head(BytesIO(golden_bytes()), len(golden_bytes()))
    head = stored.head
    assert (head.tokens, len(head.counts.raw), head.ctx, REASONS.index(head.reason)) == (3, 2, 4096, 1)
    written = bytes_of(head_image(head, arrays_in(golden_bytes(), stored)))
    dump = [f"{at:04x}  {written[at:at + 16].hex(' ')}" for at in (0, 16, 32, 48, len(written) - 32, len(written) - 16)]
    assert dump == blocks(CACHE, "text")[0].splitlines()
    assert open_head(written)[0].tokens == 3


def test_the_cache_s_page_lists_the_metadata_in_their_order():
    stored = read_head(BytesIO(golden_bytes()), len(golden_bytes()))
    listed = re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text(CACHE).partition("| key | value |")[2]
                                                      .partition("\n\n")[0], re.MULTILINE)))
    assert listed == [*stored.container.metadata, "segments", "segment_tokens"]


def test_the_numbers_of_saving_are_the_defaults():
    rules, told = SaveRules(), text(CACHE)
    for number in (rules.min_tokens, rules.cold_max, rules.step, rules.trim):
        assert f"{number:,}" in told


def test_the_example_of_an_operation_works_on_the_cpu_and_in_the_emulator(monkeypatch):
    pytest.importorskip("mlx.core")
    from ds4mlx.ops import kernel
    page, ours = "docs/adding-an-operation.md", kernel._text
    (source,), (operation, test) = blocks(page, "c"), blocks(page, "python")
    monkeypatch.setattr(kernel, "_text", lambda file: source if file == "silu.metal" else ours(file))
    op, tests = {}, {}
    exec(compile(operation, page, "exec"), op)
    exec(compile(test, page, "exec"), tests)
    proof = tests["test_the_kernel_matches_the_reference"]
    for shape in proof.pytestmark[0].args[1]:
        proof(op["silu"], shape)
