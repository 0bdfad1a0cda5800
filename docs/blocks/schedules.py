"""The pages of the schedules, and the formulas for their bytes."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import distgemm
from blocks import FORMULAS, rows_of, table
from distgemm.schedulers import (
    all_reduce,
    all_to_all,
    list_patterns,
    mesh,
    nested,
    one_d,
    schedule_aliases,
    schedule_doc,
    schedule_mesh_rank,
    schedule_options,
)
from distgemm.viz.text import show_schedule

MESHES = {1: (4,), 2: (2, 2), 3: (2, 2, 2)}
LARGE_MESHES = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}
GROUPS = {
    "all_gather": "All-gather + GEMM",
    "reduce_scatter": "GEMM + reduce-scatter",
    "all_reduce": "GEMM + all-reduce",
    "all_to_all": "All-to-all before or after a GEMM",
    "tensor_parallel": "On a mesh",
}


LAYERS = {
    "all_gather": ("fc1", 8192, 57344, 8192),
    "all_to_all.*_d": ("qkv", 8192, 10240, 8192),
    "all_to_all.*_a": ("out", 8192, 8192, 8192),
    "": ("fc2", 8192, 8192, 28672),
}
"""The layers of :func:`layer_of`, by the beginning of the schedule's name."""


def layer_of(name: str) -> tuple[str, int, int, int]:
    """The layer of Llama 70B that a schedule's page shows, and its m, n and k."""
    return next(layer for prefix, layer in LAYERS.items() if re.match(prefix, name))


def by_group() -> dict[str, list[str]]:
    """All schedules, by the title of their group."""
    found: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    for name in distgemm.list_schedules():
        found[next(title for prefix, title in GROUPS.items() if name.startswith(prefix))].append(name)
    return found


def schedule_index() -> str:
    """The page that lists all schedules."""
    lines = [NOTE, "# All schedules\n", "r is the rank and i the iteration; sums are modulo the number of ranks N."]
    lines += ["[Which schedule?](../which_schedule.md) says how to select one.\n"]
    for title, names in by_group().items():
        rows = [[f"[{name}]({name}.md)", _escaped(schedule_doc(name))] for name in names]
        lines += [f"## {title}\n", rows_of("schedule | work and movement", rows), ""]
    return "\n".join(lines)


def schedule_page(name: str) -> str:
    """The page of a schedule."""
    axes = schedule_mesh_rank(name)
    scheduler = distgemm.get_schedule(name, mesh=MESHES[axes])
    size = "world_size=8" if axes == 1 else f"mesh={LARGE_MESHES[axes]}"
    shape = f" as a mesh of {'x'.join(map(str, MESHES[axes]))}" if axes > 1 else ""
    defaults = [pattern for pattern, default in list_patterns().items() if default == name]
    facts = {
        "Also called": ", ".join(f"`{alias}`" for alias in schedule_aliases(name)),
        "Default of the pattern": ", ".join(f"`{pattern}`" for pattern in defaults),
        "Takes": "`world_size`" if axes == 1 else f"a `mesh` of {axes} sides",
        "Options": ", ".join(f"`{key}={value!r}`" for key, value in schedule_options(name).items()),
    }
    each = FORMULAS["schedules"][name]
    waiting = f", where W is {_waiting(each['waiting'])}" if each["waiting"] else ""
    return "\n".join(
        [
            NOTE,
            f"# {name}\n",
            f"{docstring(name)}\n",
            *(f"- {key}: {value}" for key, value in facts.items() if value),
            f'\n```python\nschedule = distgemm.get_schedule("{name}", {size})\n```\n',
            f"The grids below are of {scheduler.world_size} ranks{shape} and one chunk.\n",
            f"<!-- picture: {name}.svg Tile grids and work of {name} -->\n",
            "## The plan moves\n",
            f"Times are predicted for the layer {layer_of(name)[0]} of Llama 70B on H200s. Select a tile, a rank or a "
            "bar for its history. [Explorer](../explorer.md) explains the page.\n",
            f"<!-- explorer: {name}_explorer.html The plan of {name} moves -->\n",
            "## Grids\n\n```text",
            show_schedule(scheduler),
            "```\n\n## Bytes and workspace\n\nEach rank sends\n",
            *_sent(name),
            f"\nIts workspace takes **{each['workspace']}** bytes{waiting}.\n",
            f"{_example(name)}\n",
            "[Bytes and workspace](../formulas.md) explains the symbols.\n",
        ]
    )


NOTE = "<!-- python docs/tables.py writes this page. -->\n"


def docstring(name: str) -> str:
    """The docstring of a schedule's function as Markdown; its arguments are a list."""
    builders = {**vars(one_d), **vars(all_reduce), **vars(all_to_all), **vars(mesh), **vars(nested)}
    text = _escaped(inspect.getdoc(builders[name]) or "")
    description, *sections = re.split(r"\n\n(?=(?:Args|Raises):\n)", text)
    items = []
    for section in (section for section in sections if section.startswith("Args:")):
        for item in re.split(r"\n    (?=\w+: )", section)[1:]:
            argument, _, meaning = " ".join(item.split()).partition(": ")
            items.append(f"- `{argument}`: {meaning}")
    return "\n".join([description, *([""] if items else []), *items])


def _escaped(text: str) -> str:
    """Text in which a product is no emphasis."""
    return re.sub(r"(?<=\w)( ?)\*( ?)(?=\w)", r"\1·\2", text)


def _sent(name: str) -> Iterator[str]:
    """What each rank sends, an item for each move."""
    options = schedule_options(name)
    for move in FORMULAS["schedules"][name]["moves"]:
        route = options.get(move["route"], move["route"])
        if route in FORMULAS["schedules"]:  # a level of a nested schedule
            route = FORMULAS["schedules"][route]["moves"][0]["route"]
        formulas = {
            peer: re.sub(r"\bT\b", move["share"], re.sub(r"\bX\b", move["axis"], formula))
            for peer, formula in FORMULAS["routes"][route].items()
        }
        where = {"next": "to the next rank", "previous": "to the previous rank", "each": "to each other rank"}
        parts = [f"**{formula}** bytes {where[peer]}" for peer, formula in formulas.items() if formula != "0"]
        axis = f"along {move['axis']}: " if schedule_mesh_rank(name) > 1 else ""
        note = f" (with `{move['route']}={options[move['route']]!r}`)" if move["route"] in options else ""
        yield f"- {axis}{', '.join(parts)}{note}"


def _example(name: str) -> str:
    """The bytes of one product."""
    sides = LARGE_MESHES[schedule_mesh_rank(name)]
    shape = layer_of(name)[1:]
    plan = distgemm.make_plan(distgemm.GemmProblem(*shape), distgemm.get_schedule(name, mesh=sides))
    links = plan.link_bytes()
    sent = max(sum(size for (source, _), size in links.items() if source == rank) for rank in range(plan.world_size))
    workspace = max(plan.workspace_bytes(rank) for rank in range(plan.world_size))
    ranks = f"{plan.world_size} ranks" + (f" as {'x'.join(map(str, sides))}" if len(sides) > 1 else "")
    return (
        f"With m, n, k = {', '.join(map(str, shape))} in bfloat16 on {ranks}, a rank sends {_mib(sent)}, the busiest "
        f"link carries {_mib(max(links.values()))}, and the workspace takes {_mib(workspace)}."
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"


@table
def routes() -> str:
    """What one rank sends, by route."""
    head = "route | to the next rank | to the previous rank | to each other rank"
    return rows_of(head, [[f"`{name}`", *each.values()] for name, each in FORMULAS["routes"].items()])


@table
def formulas(kind: str) -> str:
    """What moves and what the workspace takes: of the "schedules", or of the "nested_reductions"."""
    head = "schedule" if kind == "schedules" else "across, inside"
    rows = [
        [f"`{name}`", "; ".join(_move(move) for move in each["moves"]), each["workspace"], _waiting(each["waiting"])]
        for name, each in FORMULAS[kind].items()
    ]
    return rows_of(f"{head} | what moves | workspace of each rank | W", rows)


@table
def nested_all_to_alls() -> str:
    """What moves with an all-to-all inside hosts, and another one, a gather or sums across."""
    rows = [[f"`{name}`", "; ".join(map(_move, moves))] for name, moves in FORMULAS["nested_all_to_alls"].items()]
    return rows_of("across, inside | what moves", rows)


@table
def nested_all_reduce() -> str:
    """What the final copies of a nested all-reduce add to the workspace."""
    return str(FORMULAS["nested_all_reduce"])


@table
def across_hosts() -> str:
    """The bytes that go across hosts, of nested and of flat schedules."""
    head = "pattern | nested | flat, `direct` or `pairwise` | flat, `ring` or `chain`"
    return rows_of(head, [[pattern, *each.values()] for pattern, each in FORMULAS["across_hosts"].items()])


def _move(move: dict[str, str]) -> str:
    return f"{move['share']} by `{move['route']}` along {move['axis']}"


def _waiting(by_option: dict[str, str]) -> str:
    return "; ".join(f"`{option}`: {formula}" if option else formula for option, formula in by_option.items())


@table
def lines_of_schedules() -> str:
    """Lines of the module that has the schedules with an all-to-all, without comments and docstrings."""
    path = Path(all_to_all.__file__)
    tree = ast.parse(path.read_text(encoding="utf-8"))
    rows = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            lines = ast.unparse(node.body[1:] if ast.get_docstring(node) else node.body).splitlines()
            what = "schedule" if node.name in distgemm.list_schedules() else "shared by two schedules"
            rows.append([f"`{node.name}`", what, str(len(lines))])
    return rows_of("function | what | statements, lines", rows)
