"""Each folder of the package is one layer: imports go from a layer to those before it, and modules have no cycles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "distgemm"

LAYERS = (
    "system",
    "arguments",
    "layouts",
    "schedulers",
    "plan",
    "simulator",
    "viz",
    "gemm",
    "runtime",
    "fp8",
    "measure",
    "tune",
    "api",
    "torch_ops",
    "nn",
    "integrations",
    "bench",
    "cli",
    "__main__",
)
ALLOWED_CYCLES = {("plan.plan", "plan.verify_rotated")}
"""Plan.verify() imports the checker when it is called."""


def modules() -> Iterator[tuple[str, Path]]:
    """Names, without the package's, and files. Links are followed."""
    for top in sorted(PACKAGE.iterdir()):
        for path in [top] if top.suffix == ".py" else sorted(top.rglob("*.py")):
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"), path


FILES = dict(modules())


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Lines, and the modules of the package that are imported there: also within functions, and only for types."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            raise AssertionError(f"{path}:{node.lineno}: imports are absolute")
        else:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if not name.startswith("distgemm."):
                continue
            module = name.removeprefix("distgemm.")
            while module and module not in FILES:  # a name in a module
                module = module.rpartition(".")[0]
            if module:
                yield node.lineno, module


def layer(module: str) -> int:
    return LAYERS.index(module.partition(".")[0])


def test_every_folder_is_a_layer() -> None:
    assert {name.partition(".")[0] for name in FILES} - {"__init__"} == set(LAYERS)


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])
def test_imports_go_one_way(name: str) -> None:
    above = [f"line {line} imports {other}" for line, other in imported(FILES[name]) if layer(other) > layer(name)]
    assert not above, f"distgemm.{name} is in a layer before what it imports: {'; '.join(above)}"


def test_modules_have_no_cycles() -> None:
    graph = {
        name: {
            other
            for _, other in imported(path)
            # A package's __init__ imports its modules; a module that names its own package means a module of it.
            if other != name and (name, other) not in ALLOWED_CYCLES
        }
        for name, path in FILES.items()
        if name != "__init__"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' <- '.join(error.args[1])}")
