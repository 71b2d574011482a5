"""Who may import whom, read from the sources, and tried on a machine without MLX."""
import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "ds4mlx"
BOTTOM = {"errors", "config"}
LEAF = BOTTOM | {"text.segments"}  # pure data: what a prompt is made of

# Package, or single module -> what it may import besides itself. The longest name that fits a module counts.
TABLE = {
    "errors": set(), "config": {"errors"},
    "gguf": BOTTOM, "text": BOTTOM, "chat": LEAF, "sessions": LEAF,
    "engine.protocol": BOTTOM,
    "models": LEAF | {"gguf", "ops"}, "ops": BOTTOM | {"gguf", "metal_kernels", "cuda_port"},
    "engine": LEAF | {"gguf", "models", "ops", "metal_kernels", "cuda_port"},
    "engine.stub": LEAF | {"engine.protocol", "gguf", "text"},  # its script may be written as text
    "evaluation": LEAF | {"chat", "text", "engine.protocol"},
    "quant": BOTTOM | {"gguf", "models", "text", ""},
    "service": BOTTOM | {"chat", "sessions", "text", "gguf", "engine.protocol", "engine.open"},
    "server": BOTTOM | {"chat", "service", "engine.protocol", "text.segments"},
    "tiny": LEAF | {"gguf", "text", "chat", "models", ""},
    "tiny.training": LEAF | {"gguf", "models", "quant", "tiny"},
    "cli": BOTTOM | {"chat", "text", "sessions", "gguf", "models", "engine.protocol", "engine.open",
                     "engine.mlx_importance", "engine.mlx_kernels", "engine.mlx_memory", "engine.mlx_plan", "quant",
                     "evaluation", "service", "server", "tiny", ""},
    "cli.bench_op": {"errors", "cli", "cuda_port"},
    "notebook": BOTTOM | {"chat", "text", "gguf", "models", "engine", "service", "server", "tiny"},
    "api": BOTTOM | {"chat", "text", "sessions", "gguf", "engine", "models", "service", "server", "tiny"},
    "__main__": {"cli"}, "": {"api", "config", "engine", "models", "notebook", "text"},  # when they are used
}
# Where MLX lives. All else runs on a machine that has none.
GRAPH = ("graph", "attention", "indexer", "compressor", "hyper", "experts", "layers", "pages", "rope", "stacked",
         "state", "steering", "traced", "weights")
MLX = ("ops", "notebook", "engine.mlx_", *(f"models.deepseek_v4.{part}" for part in GRAPH))
TORCH = tuple(f"tiny.training.{part}" for part in (     # where PyTorch lives; all else runs without
    "attention", "experts", "few_bits", "marks", "model", "optimizer", "parts", "rounding", "sinkhorn", "train"))
SIBLINGS = ("metal_kernels", "cuda_port")   # mapped into the package from folders beside it
HEAVY = {"mlx", "mlx_lm", "numpy", "tokenizers", "starlette", "hypercorn", "rich", "prompt_toolkit", "transformers",
         "asyncio", "ssl"}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(ROOT.rglob("*.py"))}


def imports(path):
    """Absolute names that a file imports, at any depth, those for type checkers included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def within(name, owner):
    return name == owner or name.startswith(f"{owner}.") or owner.endswith("_") and name.startswith(owner)


def own_modules(path):
    """Our modules among a file's imports: `from ds4mlx.chat import events` is chat.events, not chat."""
    for name in imports(path):
        if within(name, "ds4mlx"):
            inner = name.removeprefix("ds4mlx").lstrip(".")
            while inner not in MODULES and inner and inner not in SIBLINGS:
                inner = inner.rpartition(".")[0]
            yield inner


def test_a_module_imports_only_what_its_layer_may():
    wrong = []
    for module, path in MODULES.items():
        layer = max((layer for layer in TABLE if within(module, layer) or not layer), key=len)
        allowed = {*TABLE[layer], *([layer] if layer else [])}
        wrong += [f"{module} imports {used or 'ds4mlx'}" for used in own_modules(path)
                  if not any(within(used, name) if name else not used for name in allowed)]
    assert wrong == []


def test_mlx_is_imported_only_where_it_lives():
    wrong = {module: name for module, path in MODULES.items() for name in imports(path)
             if name.split(".")[0] in ("mlx", "mlx_lm") and not any(within(module, place) for place in MLX)}
    assert wrong == {}


def test_the_environment_is_read_in_one_place():
    reads = re.compile(r"os\.environ|getenv|import environ")
    assert [module for module, path in MODULES.items() if reads.search(path.read_text("utf-8"))] == ["config"]


def in_new_interpreter(code):
    return subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)


def test_everything_else_works_on_a_machine_without_mlx():
    free = [m for m in MODULES if m != "__main__" and not any(within(m, place) for place in (*MLX, *TORCH))]
    code = ("import sys, importlib\nfor name in ('mlx', 'mlx_lm', 'torch'): sys.modules[name] = None\n"
            f"for name in {free}: importlib.import_module('.'.join(filter(None, ['ds4mlx', name])))")
    result = in_new_interpreter(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("arguments", [
    ["--help"], ["chat", "--help"], ["run", "--help"], ["serve", "--help"], ["cache", "ls", "--help"], ["--version"],
    ["help", "logits"], ["top", "--help"], ["completion", "bash"]])
def test_help_imports_nothing_heavy(arguments):
    code = ("import sys\nfrom ds4mlx.cli.main import main\n"
            "try:\n    main(" + repr(arguments) + ")\nexcept SystemExit:\n    pass\n"
            "print('\\n'.join(sys.modules), file=sys.stderr)")
    loaded = {name.split(".")[0] for name in in_new_interpreter(code).stderr.split()}
    assert "ds4mlx" in loaded and not loaded & HEAVY


@pytest.mark.parametrize("command", ["tokens", "inspect"])
def test_a_command_that_needs_no_weights_imports_no_mlx(command, tiny_path, tmp_path):
    arguments = [command, "-m", str(tiny_path), *(["-p", "text"] if command == "tokens" else [])]
    code = ("import sys\nfrom ds4mlx.cli.main import main\ncode = main(" + repr(arguments) + ")\n"
            "print('mlx' in sys.modules or 'mlx.core' in sys.modules, code, file=sys.stderr)")
    assert in_new_interpreter(code).stderr.split() == ["False", "0"]
