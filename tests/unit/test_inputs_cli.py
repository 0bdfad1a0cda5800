"""Wrong options, arguments and files of every command."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch  # noqa: F401  (imported before the time is limited)
from typer.testing import Result

import distgemm.tune  # noqa: F401
from tests.unit.bad_inputs import DEPTHS, LIMIT_S, time_limit
from tests.unit.command import invoke

LONG, LONGER = "9" * 400, "9" * 5000
COUNTS = (
    "",
    "x",
    "0",
    "-1",
    "1.5",
    "1e3",
    "nan",
    "inf",
    "1-999999999",
    "1,2",
    "0x10",
    "None",
    "[1]",
    LONG,
    LONGER,
    "-" + LONG,
)
EXTENTS = (*COUNTS, str(2**40))
RANKS = (*COUNTS, "8193", "999999999")
TIMES = ("", "x", "0", "-1", "nan", "inf", "1e999", "1,5", "None", LONG, LONGER)
NAMES = ("", "nope", "NOPE", " full", "x,y", "None", "9" * 400)
MESHES = (
    "",
    "x",
    "2x",
    "x2",
    "axb",
    "0x2",
    "-1x2",
    "2.5x2",
    "2xx2",
    "2,2",
    "(2,2)",
    "999999999",
    "99999x99999",
    LONG,
    LONGER,
)
OPTIONS = (
    "",
    "chunks",
    "=2",
    "=",
    "chunks=",
    "chunks=x",
    "chunks=0",
    "chunks=-1",
    "chunks=1.5",
    "chunks=true",
    f"chunks={LONG}",
    f"chunks={LONGER}",
    "chunks=99999",
    "nope=1",
)
PICTURES = ("", "x", "x.pdf", ".svg", "none/x.svg", "folder.svg", "pipe.svg", "file/x.svg")
JSON_FILES = ("", "none/x.json", "folder", "pipe", "file/x.json")
BROKEN = (
    "",
    "none.json",
    "folder.json",
    "pipe.json",
    "empty.json",
    "binary.json",
    "text.json",
    "list.json",
    "deep.json",
    "digits.json",
    "null.json",
    "other.json",
)
IMPORTS = (
    "",
    "none.py",
    "folder.py",
    "pipe.py",
    "empty.py",
    "binary.py",
    "raises.py",
    "exits.py",
    "no.such.module",
    "..",
    "a b",
    "json",
)


class Option(NamedTuple):
    """An option, or the metavar of an argument, with wrong values."""

    name: str
    values: tuple[str, ...]
    repeatable: bool = False


SCHEDULE = Option("SCHEDULE", (*NAMES, "auto"))
PROBLEM = (
    *(Option(name, EXTENTS) for name in ("--m", "--n", "--k", "--l")),
    *(Option(name, NAMES) for name in ("--dtype", "--out-dtype", "--partial-dtype")),
    Option("--m-per-rank", tuple(each for each in EXTENTS if each != "0")),
)
MODES = tuple(Option(name, NAMES) for name in ("--workspace", "--sync", "--mechanism"))
ARRANGED = (Option("--ranks", RANKS), Option("--mesh", MESHES), Option("--option", OPTIONS))
LAYERS = (
    *(Option(name, NAMES) for name in ("--model", "--layer", "--pattern")),
    *(Option(name, EXTENTS) for name in ("--m", "--tp")),
    Option("--ranks", COUNTS),
)
JSON = Option("--json", JSON_FILES)

DTYPES = tuple(Option(name, NAMES) for name in ("--dtype", "--out-dtype", "--partial-dtype"))
SHAPE = tuple(Option(name, EXTENTS) for name in ("--m", "--n", "--k"))
CHUNKS = Option("--chunks", (*COUNTS, "99999"))
MACHINE = Option("--machine", ("nope", *BROKEN))
LIMIT = Option("--limit", COUNTS)
PICTURE = Option("-o", PICTURES)
TIMELINE = Option("-o", (*PICTURES, "none/x.json", "pipe.json", "folder.json"))
CONFIGURATIONS = (
    "ag+gemm chunks",
    "ag+gemm chunks=0",
    "ag+gemm chunks=x",
    f"ag+gemm chunks={LONG}",
    "ag+gemm provider=x",
    "ag+gemm nope=1",
)
ONE = ["gemm+rs", "--ranks", "2"]

COMMANDS: dict[str, tuple[list[str], tuple[Option, ...]]] = {
    "show": (ONE, (SCHEDULE, *ARRANGED, LIMIT, PICTURE)),
    "plan": (
        ONE,
        (
            *(SCHEDULE, *ARRANGED, *PROBLEM, *MODES, LIMIT, JSON, PICTURE),
            Option("--rank", (*(each for each in COUNTS if each != "0"), "2")),
        ),
    ),
    "verify": (ONE, (SCHEDULE, *ARRANGED, *SHAPE, *MODES, JSON)),
    "simulate": (
        ONE,
        (
            *(SCHEDULE, *ARRANGED, *PROBLEM, *MODES, MACHINE, CHUNKS, JSON, TIMELINE),
            Option("--ranks-per-host", COUNTS),
            Option("--gemm-streams", (*COUNTS, "99999")),
        ),
    ),
    "demo": (
        ["--ranks", "2"],
        (
            Option("--ranks", RANKS),
            Option("--schedule-ag", (*NAMES, "gemm+rs", "tensor_parallel_2d")),
            Option("--schedule-rs", (*NAMES, "ag+gemm")),
            Option("--m", EXTENTS),
        ),
    ),
    "doctor": ([], (Option("--require", NAMES), JSON)),
    "bench": (
        [],
        (
            *(*LAYERS, JSON, PICTURE),
            Option("--schedule", (*NAMES, *CONFIGURATIONS)),
            Option("--rounds", COUNTS),
            Option("--burst-ms", TIMES),
            Option("--timeout", TIMES),
            Option("--from", BROKEN),
        ),
    ),
    "trace": (
        ONE,
        (
            *(SCHEDULE, *ARRANGED, *SHAPE, CHUNKS, MACHINE, JSON, TIMELINE),
            *(Option(name, NAMES) for name in ("--dtype", "--mechanism", "--provider", "--wait-by")),
            Option("--gemm-streams", (*COUNTS, "3")),
        ),
    ),
    "tune": ([], (*LAYERS, Option("--dtype", NAMES), JSON)),
    "tune-gemm": (
        ["128", "128", "128"],
        (
            *(*(Option(name, EXTENTS) for name in "MNK"), *DTYPES, JSON),
            Option("--chunks", COUNTS),
            Option("--majors", NAMES),
            Option("--terms", (*NAMES, "c+c", "c+", "+")),
            Option("--gemm-streams", (*COUNTS, "3")),
        ),
    ),
    "build": (
        [],
        (
            *DTYPES,
            Option("--majors", NAMES),
            Option("--terms", (*NAMES, "c+c")),
            Option("--config", (*NAMES, "128x256", "axbxc")),
            Option("--arch", ("", "x", "hopper", "-1", LONG)),
            Option("--jobs", COUNTS),
        ),
    ),
}


NEED_GPUS = ("bench", "trace", "tune", "tune-gemm")


class Command(NamedTuple):
    """A command with one wrong option."""

    arguments: list[str]
    option: str
    value: str


def commands() -> Iterator[Command]:
    for command, (right, options) in COMMANDS.items():
        for option in options:
            for value in option.values:
                if command in NEED_GPUS and value.startswith("pipe") and option.name in ("-o", "--json"):
                    continue  # it is opened after the measurement
                arguments = [*right]
                if option.name.startswith("-"):
                    if option.name in arguments:
                        place = arguments.index(option.name)
                        del arguments[place : place + 2]
                    if option.name == "--mesh" and "--ranks" in arguments:
                        place = arguments.index("--ranks")
                        del arguments[place : place + 2]
                    arguments += [f"{option.name}={value}" if option.name.startswith("--") else option.name]
                    arguments += [] if option.name.startswith("--") else [value]
                    yield Command([command, *arguments], option.name, value)
                else:
                    place = "MNK".index(option.name) if option.name in "MNK" else 0
                    arguments[place] = value
                    separator = [] if not value.startswith("-") else ["--"]
                    yield Command([command, *separator, *arguments], option.name, value)
    for value in IMPORTS:
        yield Command([f"--import={value}", "list"], "--import", value)
    for pair in (["show", "ag+gemm"], ["plan", "ag+gemm"], ["simulate", "ag+gemm"]):
        yield Command(pair, "--ranks", "neither")
    for command in COMMANDS:
        if command in ("show", "plan", "simulate"):
            yield Command([command, "ag+gemm", "--ranks=3", "--mesh=2"], "--ranks", "3")
            yield Command([command, "tensor_parallel_2d", "--ranks=4"], "--mesh", "4")
            yield Command([command, "tensor_parallel_2d", "--mesh=2x2x2"], "--mesh", "2x2x2")
    for command in ("verify", "simulate"):
        for value in ("8193", "999999999", LONG):
            yield Command([command, "all", f"--ranks={value}"], "--ranks", value)
            yield Command([command, "all", f"--mesh={value}x{value}"], "--mesh", value)
    yield Command(["simulate", "all", "--ranks=2", f"--chunks={LONG}"], "--chunks", LONG)
    yield Command(["plan", "ag+gemm", "--ranks=2", "--m=8", "--m-per-rank=3", "--m-per-rank=4"], "--m-per-rank", "7")


def identifier(command: Command) -> str:
    short = command.value if len(command.value) < 40 else f"{command.value[:10]}... of {len(command.value)}"
    return f"{command.arguments[0]} {command.option}={short}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that is no file to read or to write."""
    at = tmp_path_factory.mktemp("inputs")
    for name in ("folder", "folder.svg", "folder.json", "folder.py"):
        (at / name).mkdir()
    for name in ("pipe", "pipe.svg", "pipe.json", "pipe.py"):
        os.mkfifo(at / name)
    for name, content in {
        "file": b"",
        "empty.json": b"",
        "empty.py": b"",
        "binary.json": bytes(range(256)),
        "binary.py": bytes(range(256)),
        "text.json": b"hello",
        "list.json": b"[1, 2]",
        "deep.json": b"[" * 100_000,
        "digits.json": b'{"sms": ' + b"9" * 5000 + b"}",
        "null.json": b"null",
        "other.json": b'{"rows": 3, "about": null}',
        "raises.py": b"raise KeyError('x')",
        "exits.py": b"raise SystemExit(0)",
    }.items():
        (at / name).write_bytes(content)
    return at


@pytest.mark.sample(100)
@pytest.mark.parametrize("command", [pytest.param(each, id=identifier(each)) for each in commands()])
def test_refused(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    with time_limit(LIMIT_S):
        done = invoke(*command.arguments)
    if problem := problem_of(command, done):
        pytest.fail(f"{identifier(command)}: {problem}", pytrace=False)


def problem_of(command: Command, done: Result) -> str | None:
    """What is wrong with how a command refused its arguments; None: nothing."""
    said = done.output[-300:]
    if done.exit_code != 2:
        return f"exit status {done.exit_code}, {done.exception!r:.200}: {said}"
    lines = done.stderr.splitlines()
    late = command.value.startswith("pipe")  # whether a pipe has a reader is known only when it is opened
    if ((done.stdout or len(lines) != 1) and not late) or not lines[-1].startswith("error: "):
        return f"not one line that begins with error: {said}"
    line = lines[-1].removeprefix("error: ")
    if DEPTHS.search(line):
        return f"words of Python's own errors: {said}"
    key, _, text = command.value.partition("=")
    words = {"SCHEDULE": ["schedule"], "--option": [f"{key} is ", f"no option {key!r}"]}
    if not any(word in line for word in [command.option, *words.get(command.option, ())]):
        return f"the message does not name the option: {said}"
    digits = (text or command.value).removeprefix("-")
    wanted = [
        command.value or "''",
        *([repr(text), f"got {text.title()}", f"option {key!r}"] if text else [" .", "got ''"]),
    ]
    wanted = ["e+399", "e+400", "9" * 40] if LONG in digits else wanted
    if not any(each in line for each in wanted):
        return f"the message has none of {wanted}: {said}"
    return f"a message of {len(line)} characters" if len(line) > 1500 else None
