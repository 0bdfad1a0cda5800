"""Options that several commands share: their types, and what they mean to the library."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from distgemm.arguments import MAX_EXTENT, TECHNICAL_LIMIT, shown
from distgemm.bench.report import load
from distgemm.measure.models import MODELS
from distgemm.plan.derive import MECHANISMS, SYNCS, WORKSPACES
from distgemm.plan.options import Mesh, parse_mesh, parse_options
from distgemm.plan.problem import DTYPES, GemmProblem
from distgemm.plan.scaling import SCALINGS, read_scaling
from distgemm.schedulers import list_patterns, list_schedules, schedule_mesh_rank
from distgemm.schedulers.registry import MAX_RANKS
from distgemm.simulator.machine import Machine, list_machines

__all__ = [
    "DEFAULT_M",
    "DEFAULT_MODEL",
    "TIMEOUT_S",
    "arrangement",
    "benchmark_file",
    "cases_of",
    "check_ranks_of_mesh",
    "check_shares",
    "count_ranks",
    "each_once",
    "gemm_problem",
    "join_ranks",
    "mesh_text",
    "models_of",
    "named",
    "number",
    "one_of",
    "ranks_per_host_option",
    "read_by",
    "squarest_meshes",
]

T = TypeVar("T")

DEFAULT_M = 8192
DEFAULT_MODEL = "llama-3-70b"

TIMEOUT_S = 900.0
"""Time in which the ranks of a command must end. It includes the compilation of kernels."""


def one_of(known: Collection[str]) -> Callable[[str], str]:
    """What reads an option that has one of these values."""

    def read(text: str) -> str:
        if text not in known:
            raise typer.BadParameter(f"one of {', '.join(known)}, got {shown(text)}")
        return text

    return read


def number(least: float, most: float = MAX_EXTENT, kind: type[int] | type[float] = int) -> Callable[[Any], Any]:
    """What reads an option that has a number, whole or not, in a range."""
    what = "a whole number" if kind is int else "a number"

    def read(given: Any) -> Any:
        try:
            value = kind(given)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            limited = most <= TECHNICAL_LIMIT or (value is not None and value > most)
            words = f"from {least} to {most}" if limited else f"of at least {least}"
            raise typer.BadParameter(f"{what} {words}, got {shown(str(given))}")
        return value

    return read


def read_by(read: Callable[[str], T], name: str = "") -> Callable[[str], T]:
    """What reads an option by a function of the library, whose error becomes one of the option.

    Args:
        read: the function.
        name: the name of its argument in its errors.
    """

    def option(text: str) -> T:
        try:
            return read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error).removeprefix(f"{name} is ")) from None

    return option


def read_machine(text: str | Machine) -> Machine:
    """The machine that --machine names."""
    return Machine.load(text) if isinstance(text, str) else text


@contextmanager
def named(option: str) -> Iterator[None]:
    """A context in which an error of the library gets the name of the option that causes it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def read_option(text: str) -> str:
    """What --option gives, checked."""
    parse_options([text])
    return text


def read_mesh(text: str) -> Mesh:
    """The sides that --mesh gives.

    Raises:
        ValueError: if the text is not written like 2x4, or there are more ranks than a schedule takes.
    """
    mesh = parse_mesh(text)
    assert mesh is not None
    if prod(mesh) > MAX_RANKS:
        raise ValueError(f"a mesh such as 2x4 has at most {MAX_RANKS} ranks, got {shown(text)}")
    return mesh


def _complete(known: Collection[str]) -> Callable[[str], list[str]]:
    return lambda incomplete: [each for each in known if each.startswith(incomplete)]


def _schedule_names(incomplete: str) -> list[str]:
    return _complete([*list_schedules(), *list_patterns()])(incomplete)


def _choice(*names: str, values: Collection[str], metavar: str, help: str, default: str | None = None) -> Any:
    """An option that has one of these values."""
    return typer.Option(
        *names,
        parser=one_of(values),
        autocompletion=_complete(values),
        metavar=metavar,
        help=f"{help}: {', '.join(values)}." + (f" [default: {default}]" if default else ""),
        show_default=default is None,
    )


# --- schedules and problems -----------------------------------------------------------------------------

ScheduleName = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A schedule, an alias, or a pattern such as ag+gemm.",
        show_default=False,
        autocompletion=_schedule_names,
    ),
]
ScheduleNameOrAll = Annotated[
    str,
    typer.Argument(
        metavar="SCHEDULE",
        help="A schedule, an alias, a pattern such as ag+gemm, or all.",
        show_default=False,
        autocompletion=lambda incomplete: [*_schedule_names(incomplete), *_complete(["all"])(incomplete)],
    ),
]
Ranks = Annotated[
    int | None,
    typer.Option("--ranks", metavar="N", parser=number(1, MAX_RANKS), help="Number of ranks.", show_default=False),
]
MeshSides = Annotated[
    Any,
    typer.Option(
        "--mesh",
        metavar="PxQ",
        parser=read_by(read_mesh, "mesh"),
        help="Arrangement of the ranks, such as 2x4.",
        show_default=False,
    ),
]
ScheduleOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        parser=read_by(read_option, "option"),
        metavar="NAME=VALUE",
        help="An option of the schedule, such as chunks=2; repeatable.",
        show_default=False,
    ),
]
M = Annotated[
    int | None,
    typer.Option(
        "--m",
        metavar="M",
        parser=number(1),
        help=f"Rows of A and D. [default: {DEFAULT_M}, or the sum of --m-per-rank]",
    ),
]
N = Annotated[int, typer.Option("--n", metavar="N", parser=number(1), help="Rows of B, columns of D.")]
K = Annotated[int, typer.Option("--k", metavar="K", parser=number(1), help="Columns of A and B.")]
Batches = Annotated[int, typer.Option("--l", metavar="L", parser=number(1), help="Batches.")]
Dtype = Annotated[str, _choice("--dtype", values=DTYPES, metavar="TYPE", help="Element type of A and B")]
BDtype = Annotated[
    str | None,
    _choice("--b-dtype", values=DTYPES, metavar="TYPE", help="Element type of B, if it differs", default="as --dtype"),
]
Scaling = Annotated[
    str | None, _choice("--scaling", values=SCALINGS, metavar="NAME", help="Scales of A and B", default="none")
]
OutDtype = Annotated[
    str | None,
    _choice("--out-dtype", values=DTYPES, metavar="TYPE", help="Element type of C and D", default="as --dtype"),
]
PartialDtype = Annotated[
    str | None,
    _choice("--partial-dtype", values=DTYPES, metavar="TYPE", help="Type of partial sums", default="as --out-dtype"),
]


def _per_rank(mode: str, what: str) -> Any:
    """The option that gives what each rank holds of a mode."""
    return typer.Option(
        f"--{mode}-per-rank",
        metavar=mode.upper(),
        parser=number(0),
        help=f"{what} of a rank's shard, given once for each rank, in order.",
        show_default=False,
    )


MPerRank = Annotated[list[int] | None, _per_rank("m", "Rows")]
NPerRank = Annotated[list[int] | None, _per_rank("n", "Columns of D, or rows of B,")]
KPerRank = Annotated[list[int] | None, _per_rank("k", "Columns of A or B")]
Workspace = Annotated[str, _choice("--workspace", values=WORKSPACES, metavar="NAME", help="Slots of the plan")]
Sync = Annotated[str, _choice("--sync", values=SYNCS, metavar="NAME", help="How replays are kept apart")]
Mechanism = Annotated[str, _choice("--mechanism", values=MECHANISMS, metavar="NAME", help="How data moves")]


def ranks_per_host_option(text: str) -> Any:
    """The option --ranks-per-host with a help text."""
    return typer.Option("--ranks-per-host", metavar="N", parser=number(1), help=text, show_default=False)


RanksPerHost = Annotated[
    int | None, ranks_per_host_option("Ranks that share memory; the others are on other hosts. [default: all]")
]


def benchmark_file(text: str) -> Any:
    """The option --from, a file of distgemm bench, with a help text."""
    return typer.Option("--from", metavar="FILE", parser=read_by(load), help=text, show_default=False)


MachineOption = Annotated[
    Machine,
    typer.Option(
        "--machine",
        parser=read_by(read_machine, "machine"),
        metavar="NAME|FILE",
        help=f"What is simulated: {', '.join(list_machines())}, or a .json file.",
        autocompletion=_complete(list_machines()),
    ),
]
PerTile = Annotated[
    str | None,
    typer.Option(
        "--per-tile",
        metavar="KERNEL",
        help="Tile by tile, with a kernel such as 128x256x64_2x1_cooperative.",
        show_default=False,
    ),
]

# --- layers of models -----------------------------------------------------------------------------------

Models = Annotated[
    list[str] | None,
    _choice("--model", values=[*MODELS, "all"], metavar="NAME", help="Models; repeatable", default=DEFAULT_MODEL),
]
Layers = Annotated[
    list[str] | None,
    _choice(
        "--layer",
        values=["qkv", "out", "fc1", "fc2"],
        metavar="NAME",
        help="Layers, where fc1 is gate and up in one; repeatable",
        default="all",
    ),
]
Patterns = Annotated[
    list[str] | None,
    _choice(
        "--pattern", values=list_patterns(), metavar="NAME", help="Patterns; repeatable", default="ag+gemm and gemm+rs"
    ),
]
Tokens = Annotated[
    list[int] | None,
    typer.Option(
        "--m", metavar="M", parser=number(1), help=f"Tokens, the rows of A and D; repeatable. [default: {DEFAULT_M}]"
    ),
]
TensorParallel = Annotated[int, typer.Option("--tp", metavar="N", parser=number(1), help="Ranks that share a layer.")]
RanksOfLayers = Annotated[
    int | None,
    typer.Option(
        "--ranks",
        metavar="N",
        parser=number(1),
        help="Ranks that run. With fewer than --tp, each has the share of one of --tp ranks. [default: --tp, or as "
        "many as there are GPUs]",
    ),
]

# --- files ----------------------------------------------------------------------------------------------

Pictures = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also draw a .svg or .png, or write a .html, a page on which the plan moves; repeatable.",
        show_default=False,
    ),
]
Timelines = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Also write the timeline: .svg or .png, a picture; .html, a page on which the plan moves; .json, a trace "
        "for ui.perfetto.dev; repeatable.",
        show_default=False,
    ),
]
JsonFile = Annotated[
    Path | None,
    typer.Option(
        "--json",
        metavar="FILE",
        help="Also write JSON to this file; - prints it on standard output, and no text.",
        show_default=False,
    ),
]


# --- what options mean ----------------------------------------------------------------------------------


def each_once(given: list[Any] | None, default: list[Any]) -> list[Any]:
    """The values of a repeatable option, each once, in order."""
    return list(dict.fromkeys(given or default))


def models_of(given: list[str] | None) -> list[str]:
    """The names of models that --model gives."""
    names = each_once(given, [DEFAULT_MODEL])
    return list(MODELS) if "all" in names else names


def gemm_problem(
    m: int | None,
    n: int,
    k: int,
    batches: int,
    dtype: str,
    out_dtype: str | None,
    partial_dtype: str | None,
    m_per_rank: list[int] | None,
    n_per_rank: list[int] | None,
    k_per_rank: list[int] | None,
    b_dtype: str | None,
    scaling: str | None,
) -> GemmProblem:
    """The problem that --m, --n, --k, --l, the types, --scaling, and --m-per-rank and so on give."""
    rows, columns, depths = (tuple(each) if each else None for each in (m_per_rank, n_per_rank, k_per_rank))
    if m is None:
        m = DEFAULT_M if rows is None else sum(rows)
    elif rows is not None and sum(rows) != m:
        raise ValueError(f"--m-per-rank gives {sum(rows)} rows in all, --m {m}")
    scales = read_scaling(scaling) if scaling else None
    return GemmProblem(m, n, k, batches, dtype, out_dtype, partial_dtype, rows, columns, depths, b_dtype, scales)


def check_shares(problem: GemmProblem, mesh: Mesh) -> None:
    """Raises ValueError if --m-per-rank and so on do not give as many values as the mesh has ranks."""
    for mode in "mnk":
        shares = getattr(problem, f"{mode}_per_rank")
        if shares is not None and len(shares) != prod(mesh):
            raise ValueError(
                f"--{mode}-per-rank is given once for each of {prod(mesh)} ranks, got {len(shares)} values"
            )


def mesh_text(mesh: Mesh) -> str:
    """A mesh as --mesh takes it."""
    return "x".join(map(str, mesh))


def check_ranks_of_mesh(ranks: int | None, mesh: Mesh | None) -> None:
    """Raises ValueError if --ranks and --mesh disagree."""
    if ranks is not None and mesh is not None and ranks != prod(mesh):
        raise ValueError(f"--mesh {mesh_text(mesh)} has {prod(mesh)} ranks, --ranks says {ranks}")


def arrangement(schedule: str, ranks: int | None, sides: Mesh | None) -> Mesh:
    """The mesh of ranks that --ranks and --mesh give for a schedule.

    Raises:
        ValueError: for an unknown schedule, without either option, if they disagree, or if the schedule takes another
            number of axes.
    """
    axes = schedule_mesh_rank(schedule)
    check_ranks_of_mesh(ranks, sides)
    if sides is None and ranks is not None and axes == 1:
        return (ranks,)
    example = "--ranks, such as --ranks 8" if axes == 1 else f"--mesh, such as --mesh {mesh_text((2,) * axes)}"
    if sides is None:
        got = "neither --ranks nor --mesh" if ranks is None else f"--ranks {ranks}"
        raise ValueError(f"{schedule} takes {example}, got {got}")
    if len(sides) != axes:
        raise ValueError(f"{schedule} takes {example}, got --mesh {mesh_text(sides)}")
    return sides


def squarest_meshes(ranks: int, axes: int) -> list[Mesh]:
    """The meshes of so many ranks whose sides differ least, with the longest side last and first."""
    if axes == 1:
        return [(ranks,)]

    def arrangements(rest: int, count: int) -> list[Mesh]:
        if count == 1:
            return [(rest,)]
        sides = [side for side in range(1, rest + 1) if rest % side == 0]
        return [(side, *tail) for side in sides for tail in arrangements(rest // side, count - 1)]

    best = min(arrangements(ranks, axes), key=lambda mesh: (max(mesh) - min(mesh), mesh))
    return list(dict.fromkeys([best, best[::-1]]))


def cases_of(schedule: str, ranks: list[int], mesh: Mesh | None) -> list[tuple[str, Mesh]]:
    """Schedules, one or all, each on the mesh or on the squarest meshes of these numbers of ranks.

    Raises:
        ValueError: for an unknown schedule.
    """
    names = list_schedules() if schedule == "all" else [schedule]
    axes = {name: schedule_mesh_rank(name) for name in names}
    if mesh is not None:
        return [(name, mesh) for name in names]
    return [(name, sides) for name in names for size in ranks for sides in squarest_meshes(size, axes[name])]


def count_ranks(command: str, given: int | None, tp: int, advice: str = "") -> int:
    """How many ranks a command runs: those that torchrun has started, or one for each GPU and ``tp`` at most.

    Args:
        command: its name, for errors.
        given: what --ranks says.
        tp: what --tp says.
        advice: what to do without a GPU, for the error.

    Raises:
        ValueError: if there are fewer GPUs than --ranks says, or none.
    """
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise ValueError(f"{command} measures on GPUs, and torch finds none{advice}")
    if "WORLD_SIZE" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if given not in (None, started):
            raise ValueError(f"--ranks {given}, but torchrun has started {started}")
        return started
    size = given or min(tp, gpus)
    if size > gpus:
        raise ValueError(f"--ranks {size} needs {size} GPUs, found {gpus}")
    return size


def join_ranks(timeout: float, run: Callable[..., T], *arguments: Any) -> tuple[T, bool]:
    """What a function returns on this rank of those that torchrun has started, and whether this is the first one.

    Args:
        timeout: of the group, seconds.
        run: what each rank runs in the group of all.
        arguments: its arguments.
    """
    import torch.distributed as dist

    from distgemm.runtime.launch import init_from_env

    first = init_from_env("nccl", timeout) == 0
    found = run(*arguments)
    dist.barrier()
    dist.destroy_process_group()
    return found, first
