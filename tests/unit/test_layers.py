"""Imports go one way: planning knows no runtime, runtimes no choices, and only commands know commands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "distgemm"

LAYERS = (
    ("layouts",),
    ("schedulers",),
    ("texts", "problem", "ops", "plan", "form", "verify", "derive"),
    ("machine", "models", "simulate", "draw", "show", "command_line"),
    ("choices", "gemm"),
    ("runtime",),
    ("choice", "bench"),
    ("tune",),
    ("compiling",),
    ("torch_ops", "nn"),
    ("benchmarking", "demo", "doctor", "trace", "bench_command", "trace_command", "tune_command"),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> Iterator[tuple[str, Path]]:
    """Names, without the package's, and files. Links are followed."""
    for top in sorted(PACKAGE.iterdir()):
        for path in [top] if top.suffix == ".py" else sorted(top.rglob("*.py")):
            yield ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"), path


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Lines, and what of the package is imported there, within functions too; not what only types need."""
    tree = ast.parse(path.read_text())
    only_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in (node for node in ast.walk(tree) if id(node) not in only_types):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        for name in names:
            if name.startswith("distgemm."):
                yield node.lineno, name.removeprefix("distgemm.")


FILES = dict(modules())


def test_every_module_has_a_layer() -> None:
    assert {name.partition(".")[0] for name in FILES} - {"__init__"} == LEVEL.keys()


@pytest.mark.parametrize("name", [name for name in FILES if name != "__init__"])
def test_imports_go_one_way(name: str) -> None:
    mine = LEVEL[name.partition(".")[0]]
    above = [
        f"line {line} imports {other}"
        for line, other in imported(FILES[name])
        if LEVEL.get(other.partition(".")[0], -1) > mine  # names of distgemm itself are of no layer
    ]
    assert not above, f"distgemm.{name} is below what it imports: {'; '.join(above)}"
