"""Every public name says what it is: shapes and dtypes where it takes arrays, and the errors that it raises."""
import ast
import inspect
import re
import textwrap
from importlib import import_module

import pytest


def public(module):
    """(name, object) of what a module defines or exports, and of the methods and properties of its classes."""
    names = getattr(module, "__all__", None) or [
        name for name, found in vars(module).items()
        if not name.startswith("_") and getattr(found, "__module__", None) == module.__name__]
    for name in names:
        found = getattr(module, name)
        if inspect.isclass(found):
            yield from ((f"{name}.{member}", value) for member, value in vars(found).items()
                        if not member.startswith("_") and hasattr(value, "__func__" if isinstance(
                            value, classmethod | staticmethod) else "fget" if isinstance(value, property)
                            else "__code__"))
        if inspect.isclass(found) or inspect.isfunction(found):
            yield name, found


def raised(function):
    """Names of the errors that the body of a function raises itself, but for NotImplementedError and bare raises."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return {node.exc.func.id for node in ast.walk(tree) if isinstance(node, ast.Raise)
            and isinstance(node.exc, ast.Call) and isinstance(node.exc.func, ast.Name)
            and node.exc.func.id[0].isupper() and node.exc.func.id != "AttributeError"}


@pytest.fixture(scope="module")
def names(site_builder):
    """{module.name: object} of all that the reference shows."""
    return {f"{module}.{name}": found for module in site_builder.REFERENCE
            for name, found in public(import_module(module))}


def test_every_public_name_has_a_docstring(names):
    assert len(names) > 150 and [name for name, found in names.items() if not inspect.getdoc(found)] == []


def test_errors_that_are_raised_are_told(names):
    functions = {name: getattr(found, "__func__", getattr(found, "fget", found)) for name, found in names.items()
                 if not inspect.isclass(found)}
    assert [(name, error) for name, function in functions.items() for error in raised(function)
            if error not in (function.__doc__ or "")] == []


def test_operations_tell_the_shapes_of_their_arrays(names):
    pytest.importorskip("mlx.core")
    import mlx.core as mx
    taking = [found for name, found in names.items() if name.startswith("ds4mlx.ops.") and inspect.isfunction(found)
              and mx.array in found.__annotations__.values()]
    assert len(taking) > 15
    # Shapes, or the operations that it is made of, which tell theirs.
    told = re.compile(r"\[[\w .,*+/]+\]|[Aa]ny shape|first axis|`\w+`")
    assert [op.__name__ for op in taking if not told.search(op.__doc__)] == []


def test_a_missing_docstring_and_an_untold_error_would_be_found():
    def silent():
        raise ValueError("no")
    assert raised(silent) == {"ValueError"} and not inspect.getdoc(silent)
