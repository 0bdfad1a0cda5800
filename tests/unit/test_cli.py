"""The distgemm command: list, show, plan, demo, imports, mistakes, and lines that fit 80 columns."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import distgemm
from distgemm import Plan
from distgemm.cli import plan as plan_module
from distgemm.cli import show as show_module
from distgemm.cli import simulate as simulate_module
from distgemm.cli.main import app
from distgemm.plan.options import parse_options
from distgemm.schedulers import registry, schedule_aliases, schedule_doc, schedule_options
from distgemm.viz.text import WIDTH, show_plan, show_schedule
from tests.unit.command import invoke, refusal, succeed
from tests.unit.test_show import mesh_2d


@pytest.fixture
def schedule_2d(monkeypatch: pytest.MonkeyPatch) -> str:
    """A schedule on a mesh of two axes, registered for one test."""
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))

    @registry.register_schedule("a_test_of_2d", mesh_rank=2)
    def build(mesh: tuple[int, ...]) -> distgemm.DistributedTileScheduler:
        """A and B move."""
        return mesh_2d(mesh)

    return "a_test_of_2d"


# --- list and show ------------------------------------------------------------------------------------


def test_list(schedule_2d: str) -> None:
    blocks = re.split(r"^(?=\S)", succeed("list"), flags=re.MULTILINE)[1:]
    lines = {block.split()[0]: block.splitlines() for block in blocks}
    assert list(lines) == distgemm.list_schedules()
    assert lines["all_gather_1d_tiling_cd_rotating_a"][0].endswith(" (--ranks N, default of ag+gemm)")
    assert lines["reduce_scatter_1d_pairwise_a"][0].endswith(" (--ranks N)")
    assert lines[schedule_2d] == [f"{schedule_2d} (--mesh PxQ)", "    A and B move."]
    for name in distgemm.list_schedules():
        about = " ".join(" ".join(lines[name][1:]).split())
        options = [f"--option {key}={value}" for key, value in schedule_options(name).items()]
        aliases = [f"alias {alias}" for alias in schedule_aliases(name)]
        assert about == " ".join([schedule_doc(name), *options, *aliases])


def test_show() -> None:
    wanted = show_schedule(distgemm.get_schedule("all_gather_1d_ring_a", world_size=3, chunks=2), width=WIDTH)
    assert succeed("show", "all_gather_1d_ring_a", "--ranks", "3", "--option", "chunks=2") == wanted + "\n"
    assert "16 of 17 ranks" in succeed("show", "gemm+rs", "--ranks", "17")
    assert "17 ranks shown" not in succeed("show", "gemm+rs", "--ranks", "17", "--limit", "17")


def test_show_mesh(schedule_2d: str) -> None:
    assert "6 ranks as 2x3" in succeed("show", schedule_2d, "--mesh", "2x3")
    assert "6 ranks as 3x2" in succeed("show", schedule_2d, "--mesh", "3x2", "--ranks", "6")


# --- plan ---------------------------------------------------------------------------------------------


def test_plan() -> None:
    plan = distgemm.make_plan(distgemm.GemmProblem(8192, 57344, 8192), "gemm+rs", 4)
    assert succeed("plan", "gemm+rs", "--ranks", "4") == show_plan(plan, width=WIDTH) + "\n"
    assert succeed("plan", "gemm+rs", "--ranks", "4", "--ops") == show_plan(plan, ops=True, width=WIDTH) + "\n"
    assert succeed("plan", "gemm+rs", "--ranks", "4", "--rank", "0") == show_plan(plan, rank=0, width=WIDTH) + "\n"


@pytest.mark.parametrize(
    ("arguments", "problem", "keywords"),
    [
        ("--m 10 --n 20 --k 30", {"m": 10, "n": 20, "k": 30}, {}),
        ("--m 10 --n 20 --k 30 --l 2 --dtype float16", {"m": 10, "n": 20, "k": 30, "l": 2, "dtype": "float16"}, {}),
        (
            "--m 9 --n 9 --k 9 --out-dtype float32 --partial-dtype float64",
            {"m": 9, "n": 9, "k": 9, "out_dtype": "float32", "partial_dtype": "float64"},
            {},
        ),
        (
            "--n 8 --k 8 --m-per-rank 3 --m-per-rank 0 --m-per-rank 5",
            {"m": 8, "n": 8, "k": 8, "m_per_rank": (3, 0, 5)},
            {},
        ),
        (
            "--m 8 --n 8 --k 8 --workspace bounded --sync barrier --option chunks=2",
            {"m": 8, "n": 8, "k": 8},
            {"workspace": "bounded", "sync": "barrier", "chunks": 2},
        ),
        ("--m 8 --n 8 --k 8 --mechanism pull", {"m": 8, "n": 8, "k": 8}, {"mechanism": "pull"}),
        ("--m 8 --n 8 --k 8 --mechanism store", {"m": 8, "n": 8, "k": 8}, {"mechanism": "store"}),
    ],
)
def test_plan_json(arguments: str, problem: dict[str, Any], keywords: dict[str, Any]) -> None:
    text = succeed("plan", "gemm+rs", "--ranks", "3", *arguments.split(), "--json", "-")
    plan = distgemm.make_plan(distgemm.GemmProblem(**problem), "gemm+rs", 3, **keywords)
    assert Plan.from_json(text) == plan


def test_json_goes_to_a_file_or_to_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    for command in ("plan gemm+rs --ranks 2", "simulate gemm+rs --ranks 2", "verify gemm+rs --ranks 2"):
        done = invoke(*command.split(), "--json", str(path))
        assert (done.exit_code, done.stderr) == (0, f"wrote {path}\n")
        assert "gemm+rs" in done.stdout or "reduce_scatter" in done.stdout
        assert path.read_text() == succeed(*command.split(), "--json", "-")
        json.loads(path.read_text())


# --- pictures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("show gemm+rs --ranks 3", "Each tile has the colour"),
        ("plan gemm+rs --ranks 3 --json -", "Plan for 3 ranks"),
        ("simulate gemm+rs --ranks 3 --json -", "Predicted on"),
    ],
)
def test_pictures(command: str, says: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    svg, png = tmp_path / "a.SVG", tmp_path / "b.png"
    done = invoke(*command.split(), "-o", str(svg), "--output", str(png))
    assert (done.exit_code, done.stderr) == (0, f"wrote {svg}\nwrote {png}\n")
    assert done.stdout == succeed(*command.split())
    assert says in svg.read_text() and png.read_bytes().startswith(b"\x89PNG")


def test_a_timeline_as_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    done = invoke("simulate", "gemm+rs", "--ranks", "3", "-o", str(path))
    assert (done.exit_code, done.stderr) == (0, f"wrote {path}\n")
    names = {event["args"].get("name") for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "M"}
    assert {"rank 0", "rank 2", "copy", "gemm 0"} <= names


COMMANDS = ("show gemm+rs", "plan gemm+rs", "simulate gemm+rs")


@pytest.mark.parametrize("command", COMMANDS)
def test_files_are_checked_first(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def never(*arguments: Any, **keywords: Any) -> Any:
        raise AssertionError("computed before the arguments were checked")

    def refused(path: Path) -> str:
        return refusal(*command.split(), "--ranks", "2", "-o", str(tmp_path / "good.svg"), "-o", str(path))

    for module in (plan_module, show_module, simulate_module):
        for name in ("make_plan", "get_schedule"):
            monkeypatch.setattr(module, name, never, raising=False)
    known = ".svg, .png, .html or .json" if "simulate" in command else ".svg, .png or .html"
    for name in ("a.gif", "a", *([] if "simulate" in command else ["a.json"])):
        assert refused(tmp_path / name) == f"error: -o takes a {known} file, got '{tmp_path / name}'"
    assert refused(tmp_path / "none" / "a.svg") == (
        f"error: -o {tmp_path / 'none' / 'a.svg'}: there is no folder {tmp_path / 'none'}"
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    wanted = "error: pictures need matplotlib: pip install 'distgemm[pictures]'"
    assert refused(tmp_path / "a.png") == wanted
    assert not list(tmp_path.iterdir())


def test_a_trace_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert invoke("simulate", "gemm+rs", "--ranks", "2", "-o", str(tmp_path / "a.json")).exit_code == 0
    assert (tmp_path / "a.json").stat().st_size


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "a.json").mkdir()
    done = invoke("simulate", "gemm+rs", "--ranks", "2", "-o", str(tmp_path / "a.json"))
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: -o {tmp_path / 'a.json'}: a file is needed, and this is a folder\n",
    )


# --- schedules of one's own ---------------------------------------------------------------------------

OWN = """
from __future__ import annotations

from dataclasses import dataclass, replace

import distgemm


@dataclass
class Fields:  # looks its module up
    chunks: int


@distgemm.register_schedule(aliases=("mine",))
def an_own_one(mesh, *, chunks: int = 1):
    \"\"\"Nothing new.\"\"\"
    return replace(distgemm.get_schedule("ag+gemm", mesh=mesh, chunks=chunks), name="an_own_one")
"""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder, the current one, from which schedules can be imported for one test."""
    for names in ("_entries", "_other_names", "_patterns"):
        monkeypatch.setattr(registry, names, dict(getattr(registry, names)))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("given", ["own.py", "inner/own.py", "{}/own.py", "own", "inner.own"])
def test_import(given: str, folder: Path) -> None:
    path = folder / ("inner/own.py" if "inner" in given else "own.py")
    path.parent.mkdir(exist_ok=True)
    # A neighbour is found as it is by a program that Python runs, or from where the command is called.
    neighbour = folder / "neighbour.py" if given == "inner.own" else path.with_name("neighbour.py")
    neighbour.write_text("")
    path.write_text(OWN + "import neighbour\n")
    text = succeed("--import", given.format(folder), "show", "mine", "--ranks", "3", "--option", "chunks=2")
    assert text.startswith("an_own_one: 3 ranks, 6 iterations")


def test_an_imported_schedule_is_one_of_all(folder: Path) -> None:
    # Under the name of a module of Python, which stays what it is.
    (folder / "json.py").write_text(OWN)
    (folder / "other.py").write_text(OWN.replace("an_own_one", "another").replace('"mine"', '"yours"'))
    imports = ("--import", "json.py", "--import", "other")
    assert sys.modules["json"] is json
    for command in ("list", "verify all --ranks 2 --sync credit", "simulate all --ranks 2 --m 512"):
        text = invoke(*imports, *command.split()).stdout
        assert {"an_own_one", "another"} <= {line.split()[0] for line in text.splitlines() if line.strip()}, command
        for names in (registry._entries, registry._other_names):
            for name in ("an_own_one", "another", "mine", "yours"):
                names.pop(name, None)  # type: ignore[attr-defined]
        del sys.modules["other"]
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("given", "program", "message"),
    [
        ("none.py", "", "--import none.py: there is no such file"),
        ("none", "", "--import none: ModuleNotFoundError: No module named 'none'"),
        ("own.txt", OWN, "--import own.txt: the name of a file with Python code ends in .py"),
        ("own.py", "\n\nregister_schedule()", "--import own.py: line 3: NameError: name 'register_schedule' is not"),
        ("own", "\n\nregister_schedule()", "--import own: NameError: name 'register_schedule' is not"),
        ("own.py", "def f(:", "--import own.py: SyntaxError: invalid syntax (own.py, line 1)"),
        ("own.py", "import distgemm", "--import own.py registers no schedule: it must call distgemm.register_schedule"),
        (
            "own.py",
            OWN.replace("an_own_one", "all_gather_1d_ring_a"),
            "--import own.py: line 14: ValueError: schedule 'all_gather_1d_ring_a' is registered already",
        ),
    ],
)
def test_imports_that_fail(given: str, program: str, message: str, folder: Path) -> None:
    (folder / ("own.txt" if given == "own.txt" else "own.py")).write_text(program)
    assert refusal("--import", given, "list").startswith(f"error: {message}")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "distgemm", "list"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (2, "error: output cannot be written: No space left on device\n")


# --- demo ---------------------------------------------------------------------------------------------


def test_demo_passes_its_arguments_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    module = ModuleType("distgemm.cli.demo_run")
    module.demo = lambda *arguments, tokens, console: calls.append((*arguments, tokens))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "distgemm.cli.demo_run", module)
    succeed("demo")
    succeed("demo", "--ranks", "2", "--schedule-ag", "all_gather_1d_ring_a", "--schedule-rs", "x", "--m", "64")
    assert calls == [(4, "ag+gemm", "gemm+rs", 8192), (2, "all_gather_1d_ring_a", "x", 64)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 0", "--ranks: a whole number from 1 to 64, got '0'"),
        ("--schedule-ag nope", "unknown schedule 'nope'"),
        ("--schedule-rs tensor_parallel_2d", "takes a mesh of 2 axes"),
        (
            "--schedule-ag gemm+rs",
            "takes a schedule that gathers, got 'gemm+rs', which is reduce_",
        ),
        (
            "--schedule-rs ag+gemm",
            "takes a schedule that adds over ranks, got 'ag+gemm', which is all_",
        ),
        ("--m 0", "--m: a whole number of at least 1, got '0'"),
    ],
)
def test_demo_checks_before_it_prints(arguments: str, message: str) -> None:
    assert message in refusal("demo", *arguments.split())


# --- mistakes -----------------------------------------------------------------------------------------


DTYPES = "float64, float32, tfloat32, bfloat16, float16, float8_e4m3fn, float8_e5m2, float4_e2m1fn_x2"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("show gemm+sr --ranks 2", "unknown schedule 'gemm+sr'"),
        ("show gemm+rs", "gemm+rs takes --ranks, such as --ranks 8, got neither --ranks nor --mesh"),
        ("show gemm+rs --ranks 0", "--ranks: a whole number of at least 1, got '0'"),
        ("show gemm+rs --ranks x", "--ranks: a whole number of at least 1, got 'x'"),
        ("show gemm+rs --ranks 9000", "--ranks: a whole number from 1 to 8192, got '9000'"),
        ("show gemm+rs --mesh 2y4", "--mesh: a text such as 2x4, of integers >= 1, got '2y4'"),
        ("show gemm+rs --mesh 2x0", "--mesh: a text such as 2x4, of integers >= 1, got '2x0'"),
        ("show gemm+rs --mesh 2x4", "gemm+rs takes --ranks, such as --ranks 8, got --mesh 2x4"),
        ("show tensor_parallel_2d --ranks 8", "tensor_parallel_2d takes --mesh, such as --mesh 2x2, got --ranks 8"),
        ("show tensor_parallel_2d --ranks 8 --mesh 2x2", "--mesh 2x2 has 4 ranks, --ranks says 8"),
        (
            "show gemm+rs --ranks 2 --option chunks",
            "a schedule's option as a text such as chunks=2, got 'chunks'",
        ),
        ("show gemm+rs --ranks 2 --option chunk=2", "has no option 'chunk'"),
        ("show gemm+rs --ranks 2 --option chunks=0", "chunks is an integer >= 1, got 0"),
        ("show gemm+rs --ranks 2 --limit 0", "--limit: a whole number of at least 1, got '0'"),
        ("show all_gather_1d_pairwise_xor_a --ranks 6", "a power of two, got 6"),
        ("plan gemm+rs --ranks 2 --dtype int7", f"--dtype: one of {DTYPES}, got 'int7'"),
        ("plan gemm+rs --ranks 2 --m 0", "--m: a whole number of at least 1, got '0'"),
        ("plan gemm+rs --ranks 2 --m-per-rank x", "--m-per-rank: a whole number of at least 0, got 'x'"),
        (
            "plan gemm+rs --ranks 2 --m-per-rank 3 --m-per-rank -1",
            "--m-per-rank: a whole number of at least 0, got '-1'",
        ),
        ("plan gemm+rs --ranks 2 --m-per-rank 1", "--m-per-rank is given once for each of 2 ranks, got 1 values"),
        ("plan gemm+rs --ranks 1 --m 2 --m-per-rank 1", "--m-per-rank gives 1 rows in all, --m 2"),
        ("plan gemm+rs --ranks 2 --workspace huge", "--workspace: one of full, bounded, got 'huge'"),
        ("plan gemm+rs --ranks 2 --mechanism carry", "--mechanism: one of push, pull, store, got 'carry'"),
        ("plan gemm+rs --ranks 2 --rank 2", "--rank is an integer from 0 to 1, got 2"),
        ("plan gemm+rs --ranks 2 --json no/such.json", "--json no/such.json: there is no folder no"),
        ("simulate nope --ranks 2", "unknown schedule 'nope'"),
        ("simulate gemm+rs", "gemm+rs takes --ranks, such as --ranks 8, got neither --ranks nor --mesh"),
        (
            "simulate gemm+rs --ranks 2 --machine h300",
            "--machine: one of h100, h200, or the path of a .json file",
        ),
        ("simulate gemm+rs --ranks 2 --machine no/such.json", "machine no/such.json: "),
        ("simulate gemm+rs --ranks 2 --ranks-per-host 0", "--ranks-per-host: a whole number of at least 1, got '0'"),
        ("simulate gemm+rs --ranks 2 --mechanism all", "--mechanism: one of push, pull, store, got 'all'"),
        ("simulate gemm+rs --ranks 2 --gemm-streams 0", "--gemm-streams: a whole number of at least 1, got '0'"),
        ("simulate gemm+rs --ranks 2 --m-per-rank 1", "--m-per-rank is given once for each of 2 ranks, got 1 values"),
        ("simulate all", "simulate all takes --ranks or --mesh, got neither"),
        ("simulate all --ranks 0", "--ranks: a whole number of at least 1, got '0'"),
        ("simulate all --ranks 2 --mesh 2x2", "--mesh 2x2 has 4 ranks, --ranks says 2"),
        ("simulate all --mesh 1x1x1x2", "no schedule takes a mesh of 4 axes, got --mesh 1x1x1x2"),
        ("simulate all --ranks 2 --option chunks=0", "--option chunks= takes a number of at least 1, got 0"),
        ("simulate all --ranks 2 --chunks 1 --chunks 0", "--chunks: a whole number of at least 1, got '0'"),
        ("simulate gemm+rs --ranks 2 --chunks x", "--chunks: a whole number of at least 1, got 'x'"),
        ("simulate gemm+rs --ranks 2 --chunks 2 --option chunks=2", "by --chunks or by --option chunks=, not"),
        ("simulate gemm+rs --ranks 2 --every-chunks", "for one schedule, --chunks 1 --chunks 2 shows both"),
        ("simulate gemm+rs --chunks 1 --chunks 2", "takes --ranks, such as --ranks 8, got neither"),
        ("simulate all --ranks 2 -o a.svg", "-o draws the timeline of one plan, not of several"),
        ("simulate gemm+rs --ranks 2 --chunks 1 --chunks 2 -o a.svg", "-o draws the timeline of one plan, not of sev"),
        ("trace nope", "unknown schedule 'nope'"),
        ("trace ag+gemm --chunks 0", "--chunks: a whole number of at least 1, got '0'"),
        ("trace ag+gemm --mechanism carry", "--mechanism: one of push, pull, store, got 'carry'"),
        ("trace ag+gemm", "trace runs on GPUs, and torch finds none"),
        ("bench --model nope", "--model: one of llama-3-8b, llama-3-70b, llama-3-405b, all, got 'nope'"),
        ("bench --m x", "--m: a whole number of at least 1, got 'x'"),
        ("bench --burst-ms 0", "--burst-ms: a number of at least 0.1, got '0'"),
        ("trace ag+gemm --gemm-streams 3", "--gemm-streams: a whole number from 1 to 2, got '3'"),
        ("bench --json no/such/file.json", "there is no folder no/such"),
        ("bench", "bench measures on GPUs, and torch finds none; --from FILE shows"),
        ("tune --model nope", "--model: one of llama-3-8b, llama-3-70b, llama-3-405b, all, got 'nope'"),
        ("tune --json no/such/file.json", "there is no folder no/such"),
        ("tune", "tune measures on GPUs, and torch finds none"),
        ("verify nope", "unknown schedule 'nope'"),
        ("verify gemm+rs --ranks 0", "--ranks: a whole number of at least 1, got '0'"),
        ("verify gemm+rs --ranks 2 --sync never", "--sync: one of credit, barrier, all, got 'never'"),
        ("verify gemm+rs --mechanism carry", "--mechanism: one of push, pull, store, all, got 'carry'"),
        ("verify gemm+rs --ranks 3 --mesh 4", "--mesh 4 has 4 ranks, --ranks says 3"),
        ("verify all_gather_1d_pairwise_xor_a --ranks 6", "a power of two, got 6"),
        ("show", "Missing argument 'SCHEDULE'"),
    ],
)
def test_mistakes_are_one_line(arguments: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    line = refusal(*arguments.split())
    assert message in line
    assert not re.search(r"world_size|_per_|gemm_streams|\(\d+,", line)


def test_unknown_flags_and_commands() -> None:
    for arguments in (["show", "gemm+rs", "--bogus"], ["bogus"]):
        done = invoke(*arguments)
        assert done.exit_code == 2 and "bogus" in done.stderr and "Traceback" not in done.stderr


def test_help_is_short_for_h() -> None:
    for command in ([], ["show"], ["tune-gemm"]):
        assert succeed(*command, "-h") == succeed(*command, "--help")


def test_shells_can_complete() -> None:
    assert "--install-completion" in succeed("-h")
    for words, found in (
        ("distgemm sh", "show"),
        ("distgemm show ag", "ag+gemm"),
        ("distgemm bench --pattern gemm+r", "gemm+rs"),
        ("distgemm plan gemm+rs --mechanism pu", "pull"),
    ):
        environment = {"_DISTGEMM_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        done = CliRunner().invoke(app, [], env=environment, prog_name="distgemm")
        assert found in done.stdout.split(), done.output


LONG = "reduce_scatter_1d_pairwise_a"


@pytest.mark.parametrize(
    "command",
    [
        "list",
        "show ag+gemm --ranks 16",
        f"show {LONG} --ranks 8 --option chunks=2",
        "show tensor_parallel_3d --mesh 2x2x4",
        "plan gemm+rs --ranks 16 --ops",
        "plan tensor_parallel_2d_nested --mesh 4x4",
        "simulate all --ranks 8 --m 512 --n 512 --k 512",
        f"simulate {LONG} --ranks 8",
        "verify all --ranks 3 --sync credit --workspace full --mechanism push",
    ],
)
def test_lines_fit_80_columns(command: str) -> None:
    text = succeed(*command.split(), columns=80)
    assert [line for line in text.splitlines() if len(line) > 80] == []
    # Names and numbers are whole: a wider output has the same words.
    wide = succeed(*command.split(), columns=300)
    words = set(re.findall(r"\w+", text)) ^ set(re.findall(r"\w+", wide))
    assert not {word for word in words if not word.isdigit()}


def test_options_are_read() -> None:
    assert parse_options(["a=1", "b=-2", "c=true", "d=False", "e=x=y", "f="]) == {
        "a": 1,
        "b": -2,
        "c": True,
        "d": False,
        "e": "x=y",
        "f": "",
    }
    assert parse_options(None) == {}
    with pytest.raises(ValueError, match="option chunks is given once, got 'chunks=4' after chunks=2"):
        parse_options(["chunks=2", "chunks=4"])
    assert "option chunks is given once" in refusal(
        "show", "ag+gemm", "--ranks", "2", "--option", "chunks=1", "--option", "chunks=2"
    )


def test_version() -> None:
    assert re.fullmatch(r"distgemm (\d+\.\d+\.\d+|\(not installed\))\n", succeed("--version"))
