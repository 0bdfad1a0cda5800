"""Digests of plans and of their lowerings, to prove that a refactoring changes none of them.

The cases are every schedule on many meshes, with every mechanism, and for each of these a fixed selection from all
options, problems and planning arguments. ``baseline.json`` holds the digests of the code before the refactoring. Groups
that it names as changed hold those of a later commit, because their plans were changed on purpose: all-reduces with
ranks that multiply nothing, and bounded workspaces that were larger than full ones. Those that it names under
``without_stagger`` hold the digests of the commit that deleted this option, and the alignment of slots of 64 KiB that
plans with ``mechanism="store"`` had. Groups of the schedules in ``ADDED`` hold those of the commit that it names for
them.

A digest is taken over lines ``path = value``, one for each leaf of a plan or of a rank's actions, for example
``Action[3].ops[2].flag.number = 7``. The table ``renames.json`` is the only normalisation:

    arguments, values: old names of arguments and their old values, and the new ones
    fields:            paths of fields whose name is old at the end and new before it, and the new paths
    deleted:           fields that only the old code has; a value other than None or an empty container is an error
    defaults:          leaves, by new path, that are not written if they have this value

None and empty containers have no line, so a field that is None equals one that is empty. This
hides no change of a dep, an offset or a flag: each of these is a number with a line of its own, and the line vanishes
with the list that held it. A list whose last element has no line gets a line with its length, so lists of different
lengths differ; only an empty list equals None.

    python tests/equivalence/digests.py check                          this code against baseline.json
    python tests/equivalence/digests.py check --sample 10 --seed 1     the same for ten groups of cases
    python tests/equivalence/digests.py explain GROUP                  the digests of each case of a group
    python tests/equivalence/digests.py explain GROUP --case 3         all lines of one case, to be diffed
    python tests/equivalence/digests.py compare ONE OTHER              two files
    python tests/equivalence/digests.py write baseline.json --old      the baseline, from the old code

Python imports the ``distgemm`` that it finds: set PYTHONPATH to a checkout of the commit that baseline.json names, and
use ``--old``, to digest the old code.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import hashlib
import json
import random
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from itertools import islice, product
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import distgemm
from distgemm import GemmProblem, list_schedules, make_plan
from distgemm.plan import Plan, PlanError
from distgemm.schedulers import schedule_mesh_rank, schedule_options

HERE = Path(__file__).parent
RENAMES: dict[str, Any] = json.loads((HERE / "renames.json").read_text())
BASELINE = HERE / "baseline.json"

PLANS = 16
"""Plans of a group."""
CASES = 60
"""Cases of a group at most: some are refused."""

MESHES: dict[int, list[tuple[int, ...]]] = {
    1: [(ranks,) for ranks in range(1, 9)],
    2: [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (2, 3), (3, 2), (2, 4), (4, 2)],
    3: [(1, 1, 1), (1, 1, 4), (1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 3, 2), (3, 1, 2), (2, 2, 2)],
}
"""By the number of axes that a schedule takes."""

MECHANISMS = ("push", "pull", "store")

PLANNING = {"workspace": ("full", "bounded"), "sync": ("credit", "barrier"), "send_slots": (1, 2, 4, 16)}

REFUSALS = (PlanError, ValueError)

ONE_D = ("all_gather_1d_", "reduce_scatter_1d_", "all_reduce_1d_")
ADDED = ("all_reduce_1d_one_shot_a",)
"""Schedules that are newer than the baseline. They have groups of their own, and are not nested in cases of others."""

OPTIONS: dict[str, Sequence[int | str]] = {
    "chunks": (1, 2, 3, 4),
    "final_add": ("epilogue", "kernel"),
    "chunk_mode": ("m", "n"),
    "copies": (1, 2),
    "gather": ("direct", "ring", "bidirectional_full", "bidirectional_split"),
    "reduce": ("chain", "pairwise"),
}
"""Options of schedules. Some do not go together: a refusal is an outcome, too."""


class Variant(NamedTuple):
    """Arguments of ``lower``."""

    execution: str = "multi_kernel"
    gemm_streams: int = 2
    merge_copies: bool = False


LOWERINGS = {"multi_kernel": [Variant("multi_kernel", *rest) for rest in product((1, 2), (False, True))]}
"""What a plan is lowered for, on each rank."""


class Code(NamedTuple):
    """How the code that is digested differs from the code after the refactoring.

    lower:     the actions of a rank of a plan
    arguments: old names and values of keyword arguments, from the new ones
    option:    the new name of an option
    path:      the new path of a field
    """

    lower: Callable[[Plan, int, Variant], list[Any]]
    arguments: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: given
    option: Callable[[str], str] = lambda name: name
    path: Callable[[str], str] = lambda path: path


@cache
def new_code() -> Code:
    """The code after the refactoring."""
    from distgemm.runtime.cuda.lowering import lower
    from distgemm.runtime.executable import ExecutionConfig

    def new_lower(plan: Plan, rank: int, how: Variant) -> list[Any]:
        return lower(plan, rank, ExecutionConfig(**how._asdict()))

    return Code(new_lower)


@cache
def old_code() -> Code:
    """The code before the refactoring."""
    from distgemm.runtime.cuda.lowering import lower

    new_names, new_paths = RENAMES["arguments"], RENAMES["fields"]
    names = {new: old for old, new in new_names.items()}
    values = {name: {new: old for old, new in known.items()} for name, known in RENAMES["values"].items()}

    def arguments(given: dict[str, Any]) -> dict[str, Any]:
        return {names.get(name, name): values.get(name, {}).get(value, value) for name, value in given.items()}

    def old_lower(plan: Plan, rank: int, how: Variant) -> list[Any]:
        given = arguments(how._asdict())
        return lower(plan, rank, gated=given.pop("waits") == "gemm", **given)

    return Code(
        old_lower,
        arguments,
        option=lambda name: new_names.get(name, name),
        path=lambda path: new_paths.get(path, path),
    )


# --- lines and digests ----------------------------------------------------------------------------------


class _Field(NamedTuple):
    """A field of a record: how to get it, what it adds to the path, and its path without indices."""

    get: Callable[[Any], Any]
    suffix: str
    path: str


@cache
def _record(cls: type, path: str, renamed: Callable[[str], str]) -> tuple[str, list[_Field]] | None:
    """The class of an op, or "", and the fields of a dataclass or named tuple; None for other classes."""
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        names = list(cls._fields)
    else:
        return None
    new = [renamed(f"{path}.{name}") for name in names]
    fields = [_Field(attrgetter(name), to.removeprefix(path), to) for name, to in zip(names, new, strict=True)]
    is_op = any(map(dataclasses.is_dataclass, cls.__mro__[1:]))
    return cls.__name__ if is_op else "", fields


class Flattener:
    """Lines of values that share ops, as a plan and its lowerings do: each op is flattened once."""

    def __init__(self, renamed: Callable[[str], str]) -> None:
        self.renamed = renamed
        self.known: dict[tuple[int, str], tuple[Any, list[str]]] = {}  # holds the ops, so that no id comes again

    def lines(self, value: Any) -> list[str]:
        """The lines of a plan, or of a list of actions."""
        found: list[str] = []
        name = type(value[0] if isinstance(value, list) else value).__name__
        self._add(value, name, name, found)
        return sorted(found)  # the order of fields may change

    def _add(self, value: Any, at: str, path: str, found: list[str]) -> None:
        """Append the lines of a value. at: its path; path: the same without indices."""
        cls = type(value)
        if value is None:
            pass
        elif cls in (int, bool, str):
            if path not in RENAMES["defaults"] or RENAMES["defaults"][path] != value:
                found.append(f"{at} = {value!r}")
        elif isinstance(value, enum.Enum):
            found.append(f"{at} = {cls.__name__}.{value.name}")
        elif (record := _record(cls, path, self.renamed)) is not None:
            kind, fields = record
            if not kind:
                self._add_fields(value, at, fields, found)
                return
            key = id(value), path
            if key not in self.known:
                lines = [f".class = {kind}"]
                self._add_fields(value, "", fields, lines)
                self.known[key] = value, lines
            found += [at + line for line in self.known[key][1]]
        elif isinstance(value, Sequence):
            before = len(found)
            for index, each in enumerate(value):
                before = len(found)
                self._add(each, f"{at}[{index}]", path, found)
            if value and len(found) == before:
                found.append(f"{at}.length = {len(value)}")
        else:
            raise TypeError(f"{at} is a {cls.__name__}, which has no lines")

    def _add_fields(self, value: Any, at: str, fields: Sequence[_Field], found: list[str]) -> None:
        for field in fields:
            before = len(found)
            self._add(field.get(value), at + field.suffix, field.path, found)
            if len(found) > before and field.path in RENAMES["deleted"]:
                raise ValueError(f"{field.path} is to be deleted, and has a value: {found[before:]}")


def digest(lines: Sequence[str]) -> str:
    """A digest of lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


# --- cases ----------------------------------------------------------------------------------------------


class Group(NamedTuple):
    """Cases that differ by options, problem and planning arguments."""

    schedule: str
    mesh: tuple[int, ...]
    mechanism: str

    def __str__(self) -> str:
        return f"{self.schedule} {'x'.join(map(str, self.mesh))} {self.mechanism}"

    @classmethod
    def parse(cls, text: str) -> Group:
        schedule, mesh, mechanism = text.split()
        return cls(schedule, tuple(map(int, mesh.split("x"))), mechanism)


def groups() -> list[Group]:
    """All groups."""
    return [
        Group(schedule, mesh, mechanism)
        for schedule in list_schedules()
        for mesh in MESHES[schedule_mesh_rank(schedule)]
        for mechanism in MECHANISMS
    ]


def _problems(mesh: tuple[int, ...]) -> list[dict[str, Any]]:
    """Fields of problems. 6720, 13440 and 20160 are multiples of 840, which all numbers up to 8 divide."""
    ranks = prod(mesh)
    rows = [(0, 24, 7, 0, 16, 3, 40, 1)[rank] or 9 * (ranks == 1) for rank in range(ranks)]
    alike = [rows[-1 - rank // mesh[-1]] + 1 for rank in range(ranks)]  # for all ranks of the last axis
    return [
        {"m": 6720, "n": 6720, "k": 13440},
        {"m": 1680, "n": 20160, "k": 13440, "partial_dtype": "float32"},
        {"m": 840, "n": 6720, "k": 1680},
        {"m": 8192, "n": 28672, "k": 8192, "dtype": "float8_e4m3fn"},
        {"m": 6720, "n": 1680, "k": 6720, "dtype": "float8_e4m3fn", "out_dtype": "float16", "partial_dtype": "float32"},
        {"m": 3360, "n": 3360, "k": 3360, "dtype": "tfloat32"},
        {"m": 1000, "n": 777, "k": 513, "dtype": "float32"},
        {"m": 129, "n": 1001, "k": 4000, "out_dtype": "float32", "partial_dtype": "bfloat16"},
        {"m": 3, "n": 5, "k": 2, "dtype": "float32"},
        {"m": 1, "n": 1, "k": 1, "dtype": "float16"},
        {"m": 840, "n": 840, "k": 840, "l": 3},
        {"m": 50, "n": 33, "k": 70, "l": 2, "dtype": "float64"},
        {"m": sum(rows), "n": 840, "k": 1680, "m_per_rank": rows},
        {"m": sum(alike) // mesh[-1], "n": 90, "k": 64, "dtype": "float8_e4m3fn", "m_per_rank": alike},
        {"m": 48 * ranks, "n": 512, "k": 4096, "m_per_rank": [48] * ranks},
    ]


def options_of(code: Code, schedule: str) -> Iterator[dict[str, Any]]:
    """The combinations of a schedule's options."""
    names = [code.option(name) for name in schedule_options(schedule)]
    one_d = [name for name in list_schedules() if name.startswith(ONE_D) and name not in ADDED]
    known: dict[str, Sequence[int | str]] = {**OPTIONS, "across": one_d, "inside": one_d}
    for values in product(*(known[name] for name in names)):
        yield dict(zip(names, values, strict=True))


class Case(NamedTuple):
    """A problem's fields and further arguments of make_plan, and all of it as a text."""

    text: str
    problem: dict[str, Any]
    arguments: dict[str, Any]


def cases(code: Code, group: Group) -> Iterator[Case]:
    """All combinations of arguments in a group, in the order of a checksum."""
    planning = [dict(zip(PLANNING, values, strict=True)) for values in product(*PLANNING.values())]
    every = []
    for options, problem, planned in product(options_of(code, group.schedule), _problems(group.mesh), planning):
        arguments = {**planned, **options}
        every.append(Case(json.dumps({"problem": problem, **arguments}, sort_keys=True), problem, arguments))
    return iter(sorted(every, key=lambda case: (zlib.crc32(f"{group} {case.text}".encode()), case.text)))


class Outcome(NamedTuple):
    """What is compared.

    kind:  "plan", or a key of LOWERINGS
    name:  of the lowering within its case
    lines: of the plan or the actions; the name of an exception where it is a refusal
    """

    kind: str
    name: str
    lines: list[str] | str

    def __str__(self) -> str:
        return f"{self.name}: {self.lines if self.refused else digest(self.lines)}"

    @property
    def refused(self) -> bool:
        return isinstance(self.lines, str)


def outcomes(code: Code, group: Group, case: Case) -> Iterator[Outcome]:
    """The plan of a case, and all its lowerings."""
    arguments = code.arguments(case.arguments)
    try:
        problem = GemmProblem(**case.problem)
        plan = make_plan(problem, group.schedule, mesh=group.mesh, mechanism=group.mechanism, **arguments)
    except REFUSALS as error:
        yield Outcome("plan", "plan", type(error).__name__)
        return
    flattener = Flattener(code.path)
    yield Outcome("plan", "plan", flattener.lines(plan))
    for rank in range(plan.world_size):
        for kind, ways in LOWERINGS.items():
            for how in ways:
                name = " ".join(map(str, (f"rank {rank}", *how, "copy_engine")))  # as the baseline has it
                try:
                    actions = code.lower(plan, rank, how)
                except REFUSALS as error:
                    yield Outcome(kind, name, type(error).__name__)
                else:
                    yield Outcome(kind, name, flattener.lines(actions))


def outcomes_of(code: Code, group: Group) -> Iterator[tuple[Case, Outcome]]:
    """Those of a group: of as many cases as it takes to make PLANS plans, and of CASES at most."""
    made = 0
    for case in islice(cases(code, group), CASES):
        for outcome in outcomes(code, group, case):
            made += outcome.kind == "plan" and not outcome.refused
            yield case, outcome
        if made == PLANS:
            return


def digest_group(old: bool, group: Group) -> dict[str, list[int | str]]:
    """By kind of outcome: how many there are, how many refusals besides, and the digest of all."""
    code = old_code() if old else new_code()
    lines: dict[str, list[str]] = {kind: [] for kind in ("plan", *LOWERINGS)}
    counts: Counter[tuple[str, bool]] = Counter()
    for case, outcome in outcomes_of(code, group):
        lines[outcome.kind].append(f"{case.text} {outcome}")
        counts[outcome.kind, outcome.refused] += 1
    return {kind: [counts[kind, False], counts[kind, True], digest(found)] for kind, found in lines.items()}


# --- files ----------------------------------------------------------------------------------------------

Digests = dict[str, dict[str, list[int | str]]]
"""What :func:`digest_group` finds, by the names of groups."""


def make_digests(chosen: Sequence[Group], old: bool = False, jobs: int = 1) -> Digests:
    """The digests of groups."""
    if jobs == 1:
        return {str(group): digest_group(old, group) for group in chosen}
    with ProcessPoolExecutor(jobs) as pool:
        return dict(zip(map(str, chosen), pool.map(partial(digest_group, old), chosen), strict=True))


def sample(groups_of: Digests, count: int, seed: int) -> Digests:
    """So many groups by chance, the same ones for the same seed."""
    names = random.Random(seed).sample(sorted(groups_of), count)
    return {name: groups_of[name] for name in names}


def differences(one: Digests, other: Digests) -> list[str]:
    """In which groups two sets of digests differ, and by what."""
    found = []
    for name in dict.fromkeys([*one, *other]):
        if name not in one or name not in other:
            found.append(f"{name}: only in {'one' if name in one else 'the other'}")
        elif kinds := [kind for kind in one[name] if one[name][kind] != other[name][kind]]:
            found.append(f"{name}: {', '.join(f'{kind} {one[name][kind]} {other[name][kind]}' for kind in kinds)}")
    return found


def count_of(groups_of: Digests) -> str:
    """How many plans, lowerings and refusals there are."""
    sums = {
        kind: (sum(int(of[kind][0]) for of in groups_of.values()), sum(int(of[kind][1]) for of in groups_of.values()))
        for kind in ("plan", *LOWERINGS)
    }
    lowerings = sum(sums[kind][0] for kind in LOWERINGS)
    each = "; ".join(f"{kind} {made} and {refused} refusals" for kind, (made, refused) in sums.items())
    return f"{len(groups_of)} groups, {lowerings} lowerings: {each}"


def _commit() -> str:
    """The last commit that changed the code that is imported."""
    root = Path(distgemm.__file__).parents[1]
    command = ["git", "-C", str(root), "log", "-1", "--format=%H", "--", "distgemm", "layouts", "schedulers"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _explain(code: Code, group: Group, number: int | None) -> Iterator[str]:
    if number is None:
        number = -1
        for case, outcome in outcomes_of(code, group):
            if outcome.kind == "plan":
                number += 1
                yield f"case {number} {case.text}"
            yield f"    {outcome}"
        return
    case = next(islice(cases(code, group), number, None))
    yield f"case {number} {case.text}"
    for outcome in outcomes(code, group, case):
        yield f"# {outcome}"
        if not outcome.refused:
            yield from outcome.lines


def _compare(one: Digests, other: Digests) -> int:
    """Print the groups that differ; the exit status."""
    found = differences(one, other)
    print(*found[:20], sep="\n", end="\n" if found else "")
    print(f"{len(found)} groups differ. {count_of(one)}")
    return int(bool(found))


def main() -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(description="Digests of plans and lowerings, before and after a refactoring.")
    commands = parser.add_subparsers(dest="command", required=True)
    write, check = commands.add_parser("write"), commands.add_parser("check")
    compare, explain = commands.add_parser("compare"), commands.add_parser("explain")
    for each in (write, check, explain):
        each.add_argument("--old", action="store_true", help="the code is that before the refactoring")
    for each in (write, check):
        each.add_argument("--jobs", type=int, default=2, help="processes")
    write.add_argument("file", type=Path)
    check.add_argument("--sample", type=int, metavar="N", help="only so many groups")
    check.add_argument("--seed", type=int, default=0, help="of the sample")
    for name in ("one", "other"):
        compare.add_argument(name, type=Path)
    explain.add_argument("group", type=Group.parse, help="for example 'all_gather_1d_ring_a 4 push'")
    explain.add_argument("--case", type=int, metavar="N", help="all lines of one case")
    given = parser.parse_args()
    if given.command == "compare":
        one, other = (json.loads(path.read_text())["groups"] for path in (given.one, given.other))
        return _compare(one, other)
    if given.command == "explain":
        for line in _explain(old_code() if given.old else new_code(), given.group, given.case):
            print(line)
        return 0
    if given.command == "write":
        found = make_digests(groups(), given.old, given.jobs)
        head = {"commit": _commit(), "counts": count_of(found)}
        of_groups = ",\n".join(f"{json.dumps(name)}: {json.dumps(of)}" for name, of in found.items())
        given.file.write_text(f'{json.dumps(head)[:-1]}, "groups": {{\n{of_groups}\n}}}}\n')
        print(head["counts"])
        return 0
    baseline = json.loads(BASELINE.read_text())["groups"]
    if given.sample is not None:
        baseline = sample(baseline, given.sample, given.seed)
    # Schedules that are newer than the baseline have no groups in it.
    return _compare(baseline, make_digests([Group.parse(name) for name in baseline], given.old, given.jobs))


if __name__ == "__main__":
    sys.exit(main())
