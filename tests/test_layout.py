"""What keeps the code findable: sizes of files and functions, and one name for each operation everywhere."""
import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
ROOTS = {"src": REPOSITORY / "src" / "ds4mlx", "metal": REPOSITORY / "metal_kernels", "cuda": REPOSITORY / "cuda_port",
         "tests": REPOSITORY / "tests", "docs": REPOSITORY / "docs"}
FILES = sorted(path for root in ROOTS.values() for pattern in ("*.py", "*.metal", "*.cu", "*.cuh", "*.cpp", "*.h")
               for path in root.rglob(pattern))
MOST_LINES, MOST_FUNCTION_LINES, MOST_COLUMNS = 600, 100, 120
SHAPELESS = {"utils", "util", "helpers", "helper", "common", "manager", "misc"}


def names(paths):
    return [str(path.relative_to(REPOSITORY)) for path in paths]


def functions(path):
    tree = ast.parse(path.read_text("utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def test_files_are_short():
    assert names(path for path in FILES if len(path.read_text("utf-8").splitlines()) > MOST_LINES) == []


def test_lines_are_short():
    assert [f"{path.name}:{number}" for path in FILES
            for number, line in enumerate(path.read_text("utf-8").splitlines(), 1) if len(line) > MOST_COLUMNS] == []


def test_functions_are_short():
    assert [f"{path.stem}.{function.name}" for path in FILES if path.suffix == ".py" for function in functions(path)
            if function.end_lineno - function.lineno >= MOST_FUNCTION_LINES] == []


def test_file_names_say_what_is_inside():
    assert names(path for path in FILES if SHAPELESS.intersection(path.stem.split("_"))) == []


def test_every_kernel_has_its_operation_and_its_test():
    kernels = {path.stem for path in [*ROOTS["metal"].rglob("*.metal"), *ROOTS["cuda"].rglob("*.cu")]}
    assert kernels <= {path.stem for path in (ROOTS["src"] / "ops").glob("*.py")}
    assert kernels <= {path.stem.removeprefix("test_") for path in (ROOTS["tests"] / "ops").glob("test_*.py")}


def test_every_package_is_in_the_wheel():
    import tomllib
    listed = set(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    roots = {"ds4mlx": ROOTS["src"], "ds4mlx.metal_kernels": ROOTS["metal"], "ds4mlx.cuda_port": ROOTS["cuda"]}
    found = {".".join((package, *init.parent.relative_to(root).parts))
             for package, root in roots.items() for init in root.rglob("__init__.py")}
    assert listed == found


def test_every_folder_of_modules_is_a_package():
    assert names(path for root in ("src", "metal", "cuda") for path in ROOTS[root].rglob("*.py")
                 if not (path.parent / "__init__.py").exists()) == []


def test_test_files_have_names_of_their_own():
    found = [path.name for path in ROOTS["tests"].rglob("test_*.py")]
    assert sorted(found) == sorted(set(found))
