"""torch's own tests of its fused ops, computed by torch or, with ``--install``, by distgemm:

    python -m tests.gpu.torch_own_tests PATH/test_symmetric_memory.py
    python -m tests.gpu.torch_own_tests PATH/test_symmetric_memory.py --install --build
    python -m tests.gpu.torch_own_tests PATH/test_symmetric_memory.py --install

CONTRIBUTING.md says where the test files come from. Processes that a test starts import this module as their main
module, and install as well. Some tests assert that a kernel of torch ran, before they compare results. With
``--install`` these assertions hold where distgemm computed the call, so that the results are compared.

A class of tests whose processes live longer than one test skips the rest after a failure. Here the next test starts
new processes.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import tempfile
import time
import unittest
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer

import distgemm
from distgemm.gemm.cutlass import CutlassProvider
from distgemm.gemm.nvcc import KernelSource, build
from distgemm.plan import GemmProblem, make_plan
from distgemm.runtime.cuda.binding import Binder
from distgemm.torch_ops.report import REPORT
from distgemm.tune import TunedConfig

ENVIRONMENT = "DISTGEMM_TORCH_OWN_TESTS"
"""The variable by which processes of tests know that they install, and how."""
GATHER, SCATTER = "all_gather_1d_tiling_cd_rotating_a", "reduce_scatter_1d_pairwise_a"
TORCH_KERNELS = ("PersistentAsyncInputScheduler", "multimem_all_gather_kernel")
"""Kernels of torch whose names tests look for in a profile."""


# --- in each process of the tests ------------------------------------------------------------------------


class Noted(Counter[Any]):
    """Calls of torch's fused ops. Each one is also appended to a file that all processes share.

    Args:
        path: the file.
        kind: "served" or "not served".
    """

    def __init__(self, path: str, kind: str) -> None:
        super().__init__()
        self.path, self.kind = path, kind

    def __setitem__(self, key: Any, count: int) -> None:
        super().__setitem__(key, count)
        site, text = key
        append(self.path, kind=self.kind, op=site.op, site=str(site), text=text)


def append(path: str, **event: str) -> None:
    """Append one line to a file to which other processes append, too."""
    with open(path, "ab", buffering=0) as file:
        file.write(json.dumps(event).encode() + b"\n")


def install_here() -> None:
    """Let distgemm compute torch's fused ops in this process, as the environment says."""
    how = json.loads(os.environ[ENVIRONMENT])
    path = how["events"]
    REPORT.served, REPORT.not_served = Noted(path, "served"), Noted(path, "not served")
    distgemm.install(gather=how["gather"], scatter=how["scatter"])
    show_kernels_of_torch(path)


class Shown(NamedTuple):
    """What a profile says of a kernel, as far as tests read it."""

    key: str


def show_kernels_of_torch(path: str) -> None:
    """Let profiles have the kernels of torch in whose place distgemm computed.

    Args:
        path: a file to which a line is appended where that happens.
    """
    profile: Any = torch.profiler.profile
    enter, events = profile.__enter__, profile.events
    before: dict[int, int] = {}

    def enter_counting(self: Any) -> Any:
        before[id(self)] = REPORT.served.total()
        return enter(self)

    def events_and_kernels(self: Any) -> list[Any]:
        found = list(events(self))
        if REPORT.served.total() == before.get(id(self), REPORT.served.total()):
            return found
        append(path, kind="waived", op="", site="", text="the assertion that a kernel of torch ran")
        return [*found, *map(Shown, TORCH_KERNELS)]

    profile.__enter__, profile.events = enter_counting, events_and_kernels


if __name__ == "__mp_main__" and ENVIRONMENT in os.environ:  # this process was started by a test
    install_here()


# --- running ------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a test. As text, it has one line.

    Attributes:
        name: its class and name.
        outcome: "passed", "skipped" or "failed".
        reason: why it was skipped or failed.
        seconds: what it took.
        events: calls of torch's fused ops in its processes.
    """

    name: str
    outcome: str = "passed"
    reason: str = ""
    seconds: float = 0.0
    events: list[dict[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        counts = Counter(event["kind"] for event in self.events)
        facts = [f"{self.seconds:.1f} s"]
        facts += [f"{counts[kind]} calls {kind}" for kind in ("served", "not served") if counts[kind]]
        facts += sorted({f"except for {event['text']}" for event in self.events if event["kind"] == "waived"})
        errors = [line for line in self.reason.splitlines() if re.match(r"\w+(Error|Exception|Skip)\b.*", line)]
        reason = f": {errors[-1] if errors else self.reason.partition(chr(10))[0]}" if self.reason else ""
        return f"{self.outcome:<8} {self.name} ({', '.join(facts)}){reason}"


class Result(unittest.TestResult):
    """Prints one line for each test, and gives it no more than a number of seconds.

    Args:
        events: the file to which processes append.
        seconds: the time of one test.
    """

    def __init__(self, events: Path, seconds: int) -> None:
        super().__init__()
        self.path, self.seconds, self.read = events, seconds, 0
        self.outcomes: list[Outcome] = []

    def startTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().startTest(test)
        self.outcomes.append(Outcome(short(test)))
        self.begin = time.monotonic()
        signal.signal(signal.SIGALRM, self.expired)
        signal.alarm(self.seconds)

    def expired(self, _: int, __: FrameType | None) -> None:
        raise TimeoutError(f"the test took more than {self.seconds} s")

    def stopTest(self, test: unittest.TestCase) -> None:  # noqa: N802
        signal.alarm(0)
        last = self.outcomes[-1]
        last.seconds = time.monotonic() - self.begin
        lines = self.path.read_bytes()[self.read :].splitlines(keepends=True)
        self.read += sum(map(len, lines))
        last.events = [json.loads(line) for line in lines]
        print(last, flush=True)
        if last.outcome != "passed":
            end_processes(type(test))
        super().stopTest(test)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:  # noqa: N802
        super().addSkip(test, reason)
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addFailure(test, err)
        self._note(test, "failed", self.failures[-1][1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addError(test, err)
        self._note(test, "failed", self.errors[-1][1])

    def addSubTest(self, test: unittest.TestCase, subtest: unittest.TestCase, err: Any) -> None:  # noqa: N802
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._note(test, "failed", f"{subtest}: {err[1]}")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:  # noqa: N802
        super().addUnexpectedSuccess(test)
        self._note(test, "failed", "it passed, and is marked as one that fails")

    def _note(self, test: unittest.TestCase, outcome: str, reason: str) -> None:
        if not isinstance(test, unittest.TestCase):  # the fixture of a class or module failed
            self.outcomes.append(Outcome(str(test), outcome, reason))
            print(self.outcomes[-1], flush=True)
            return
        last = self.outcomes[-1]
        if last.outcome != "failed":
            last.outcome, last.reason = outcome, reason.strip()


def short(test: unittest.TestCase) -> str:
    """A test's class and name."""
    return ".".join(test.id().split(".")[-2:])


def end_processes(of: Any) -> None:
    """End the processes that serve all tests of a class, if it is of that kind. Its next test starts new ones.

    They no longer agree where they are, and the class would skip the rest of its tests.

    Args:
        of: the class.
    """
    if not getattr(of, "_processes_spawned", False):
        return
    for process in of.processes:
        process.kill()
        process.join()
    of._processes_spawned = of.poison_pill = False


def tests_of(path: Path, word: str) -> Iterator[unittest.TestCase]:
    """The tests of a file whose class and name have a word. The file becomes a module that processes can import."""
    sys.path.insert(0, str(path.resolve().parent))
    module = importlib.import_module(path.stem)
    loader = unittest.TestLoader()
    for name in vars(module).copy():
        of = getattr(module, name)
        if isinstance(of, type) and issubclass(of, unittest.TestCase) and of.__module__ == module.__name__:
            for test in loader.loadTestsFromTestCase(of):
                if isinstance(test, unittest.TestCase) and word in short(test):
                    yield test


def run(tests: Iterable[unittest.TestCase], events: Path, seconds: int) -> list[Outcome]:
    """What became of each test. One that did not run has failed."""
    every = list(tests)
    result = Result(events, seconds)
    unittest.TestSuite(every).run(result)
    ran = {outcome.name for outcome in result.outcomes}
    for name in (short(test) for test in every):
        if name not in ran:
            result.outcomes.append(Outcome(name, "failed", "it did not run: an earlier failure ended the run"))
            print(result.outcomes[-1], flush=True)
    return result.outcomes


def summary(outcomes: list[Outcome]) -> list[str]:
    """The tests that called each op, the call sites, and the numbers of outcomes."""
    tests: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    sites: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        for event in outcome.events:
            if event["kind"] != "waived":
                tests[event["op"]][event["kind"]].add(outcome.name)
                sites[event["kind"], event["site"], event["text"]] += 1
    lines = [
        f"{op}: called in {len(set.union(*by_kind.values()))} tests; "
        f"distgemm computed it in {len(by_kind['served'])}, and did not in {len(by_kind['not served'])}"
        for op, by_kind in sorted(tests.items())
    ]
    for (kind, site, text), count in sorted(sites.items()):
        lines += [f"  {kind}, {count} calls: {site}", f"      {text}"]
    numbers = Counter(outcome.outcome for outcome in outcomes)
    return [*lines, ", ".join(f"{numbers[each]} {each}" for each in ("passed", "skipped", "failed"))]


# --- kernels ahead ------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call of the tests that distgemm computes: a GEMM over all ranks.

    Attributes:
        scatters: whether it is a GEMM and a reduce-scatter, not an all-gather and a GEMM.
        problem: the GEMM.
        turned_b: as in ``Binder.sources``.
    """

    scatters: bool
    problem: GemmProblem
    turned_b: bool


def calls(ranks: int) -> list[Call]:
    """The calls of torch's class AsyncTPTest."""
    return [
        Call(False, GemmProblem(512, 16, 32, dtype="float32"), True),
        Call(False, GemmProblem(4096, 1024, 1024, dtype="bfloat16"), True),
        Call(False, GemmProblem(4096, 1024, 1024, dtype="bfloat16"), False),
        Call(True, GemmProblem(512, 16, 1024 * ranks, dtype="float32"), True),
        Call(True, GemmProblem(16, 512, 1024 * ranks, dtype="float32"), False),  # D's transpose: its columns scatter
    ]


def kernels(ranks: int, gather: str, scatter: str, arch: str) -> list[KernelSource]:
    """The kernels of the calls, for schedules that are named."""
    found: dict[KernelSource, None] = {}
    with patch.object(CutlassProvider, "arch", arch):
        for call in calls(ranks):
            config = TunedConfig.parse(scatter if call.scatters else gather)
            plan = make_plan(call.problem, config.schedule, ranks, **({"sync": "barrier"} | dict(config.options)))
            execution = replace(config.execution, provider=config.execution.provider or "cutlass")
            for rank in range(ranks):
                binder = Binder(plan, rank, torch.device("cuda", 0), execution)
                found |= dict.fromkeys(binder.sources())  # an executable builds these, whatever the layout of B
                found |= dict.fromkeys(binder.sources(turned_b=call.turned_b))
    return list(found)


def main(
    path: Annotated[Path, typer.Argument(help="torch's test file.", exists=True, dir_okay=False)],
    install: Annotated[bool, typer.Option("--install", help="Let distgemm compute.")] = False,
    gather: Annotated[str, typer.Option(help="Schedule of gathers.")] = GATHER,
    scatter: Annotated[str, typer.Option(help="Schedule of scatters.")] = SCATTER,
    word: Annotated[str, typer.Option("-k", help="Only tests with this word.")] = "",
    seconds: Annotated[int, typer.Option(help="Time for one test.")] = 120,
    save: Annotated[Path | None, typer.Option("--json", help="File for the outcomes.")] = None,
    build_only: Annotated[bool, typer.Option("--build", help="Compile kernels of AsyncTPTest, and end.")] = False,
    arch: Annotated[str, typer.Option(help="With --build: the architecture.")] = "90a",
    ranks: Annotated[int, typer.Option(help="With --build: the number of ranks.")] = 2,
) -> None:
    """Run the tests of a file. The exit status is 1 if one fails."""
    if build_only:
        build(kernels(ranks, gather, scatter, arch))
        return
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        events.touch()
        if install:
            os.environ[ENVIRONMENT] = json.dumps({"events": str(events), "gather": gather, "scatter": scatter})
            install_here()  # some tests start no processes
        outcomes = run(tests_of(path, word), events, seconds)
    if not outcomes:
        raise typer.BadParameter(f"no test has the word {word!r}")
    version = f"torch {torch.__version__} ({torch.version.git_version})"
    print(*summary(outcomes), f"{path.name}, {version}, {'distgemm' if install else 'torch'} computed", sep="\n")
    if save is not None:
        facts = {"file": path.name, "torch": version, "install": install, "gather": gather, "scatter": scatter}
        save.write_text(json.dumps(facts | {"tests": [asdict(outcome) for outcome in outcomes]}, indent=1) + "\n")
    sys.stdout.flush()
    sys.exit(any(outcome.outcome == "failed" for outcome in outcomes))


if __name__ == "__main__":
    typer.run(main)
