"""The proof against an oracle: mutants of plans that the proof accepts must be right.

    python tests/mutations/run.py --count 100000 [--seed 0] [--processes 2] [--json FILE]

It mutates plans of all schedules, mechanisms, workspaces and ways to synchronise. Every second mutant goes through
JSON. The oracle of ``oracle.py`` judges each mutant, and ``Plan.verify`` accepts or refuses it. The exit status is 1 if
the proof accepts a mutant that is not right, refuses a plan that is not mutated, or raises another error than
PlanError. docs/verify.md explains the result.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import distgemm
from distgemm import GemmProblem, Plan, PlanError
from distgemm.schedulers import schedule_mesh_rank
from tests.mutations.mutants import KINDS, Mutant, NoChange, mutant
from tests.mutations.oracle import judge

MESHES = {1: [(2,), (3,), (4,)], 2: [(2, 2), (1, 3)], 3: [(2, 1, 2), (1, 2, 2)]}
MAX_OPS = 100
"""The most ops of a plan that is mutated: the oracle compares all pairs of accesses."""


def scenarios() -> list[tuple[str, tuple[int, ...], int, str, str, str, int]]:
    """Names of the plans that are mutated: schedule, mesh, chunks, workspace, sync, mechanism, shape."""
    found = []
    for name in distgemm.list_schedules():
        for mesh, chunks in product(MESHES[schedule_mesh_rank(name)], (1, 2)):
            if "xor" in name and mesh == (3,):
                continue
            for number, how in enumerate(
                product(("full", "bounded"), ("credit", "barrier"), ("push", "pull", "store"))
            ):
                found.append((name, mesh, chunks, *how, (number + chunks) % 3))
    return found


def base(name: str, mesh: tuple[int, ...], chunks: int, workspace: str, sync: str, mechanism: str, shape: int) -> Plan:
    """A plan to mutate: tiles of one or two rows (shape 0), ragged tiles (1), or partial sums of another type (2)."""
    schedule = distgemm.get_schedule(name, mesh=mesh, chunks=chunks)
    m, n, k, _ = schedule.grid
    types = {"dtype": "float16", "partial_dtype": "float32"} if shape == 2 else {}
    extents = (2 * m + 1, n + 1, 2 * k) if shape == 1 else (2 * m, n, k)
    problem = GemmProblem(*extents, l=2 if shape == 2 and m * n * k < 9 else 1, **types)  # type: ignore[arg-type]
    return distgemm.make_plan(problem, schedule, workspace=workspace, sync=sync, mechanism=mechanism)  # type: ignore[arg-type]


@cache
def bases() -> list[tuple[object, Plan]]:
    """The plans that are mutated."""
    plans = [(scenario, base(*scenario)) for scenario in scenarios()]
    return [(scenario, plan) for scenario, plan in plans if sum(map(len, plan.rank_ops)) <= MAX_OPS]


def said(plan: Plan) -> str:
    """What the proof says: "accepted", "refused", or the error that is no PlanError."""
    try:
        plan.verify()
    except PlanError:
        return "refused"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def outcome(made: Mutant, through_json: bool) -> tuple[str, str, str]:
    """What the oracle and the proof say of a mutant, and why the oracle says so."""
    plan = made.plan
    text = made.text
    try:
        if plan is not None and through_json:
            text = plan.to_json()
        if text is not None:
            plan = Plan.from_json(text)
    except PlanError as error:
        return "no plan", "refused", str(error)
    except Exception as error:
        return "no plan", f"{type(error).__name__}: {error}", ""
    assert plan is not None
    verdict = judge(plan)
    return verdict.kind, said(plan), verdict.why


def one(number: int, seed: int, plans: list[tuple[object, Plan]]) -> tuple[str, str, str, str, str]:
    """The mutant with a number: its kind, its plan, what oracle and proof say, and why."""
    rng = random.Random(f"{seed}/{number}")
    while True:
        scenario, plan = rng.choice(plans)
        kind = rng.choice(list(KINDS))
        try:
            made = mutant(plan, kind, rng)
        except NoChange:
            continue
        except (TypeError, ValueError, AttributeError):  # the second of two changes met a value of another type
            continue
        return kind, f"{seed}/{number} {scenario}", *outcome(made, bool(number % 2))


Results = list[tuple[str, str, str, str, str]]


def some(numbers: range, seed: int) -> tuple[Results, float]:
    """The outcomes of these mutants, and the longest time of one in seconds."""
    plans = bases()
    results: Results = []
    longest = 0.0
    for number in numbers:
        start = time.perf_counter()
        results.append(one(number, seed, plans))
        longest = max(longest, time.perf_counter() - start)
    return results, longest


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100_000, help="number of mutants")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    wrong = []
    plans = bases()
    for scenario, plan in plans:
        verdict = judge(plan)
        if (verdict.kind, said(plan)) != ("right", "accepted"):
            wrong.append(f"{scenario}, not mutated: {verdict}, {said(plan)}")
    size = 500
    parts = [range(at, min(at + size, options.count)) for at in range(0, options.count, size)]
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    longest = 0.0
    with ProcessPoolExecutor(options.processes) as pool:
        for results, seconds in pool.map(some, parts, [options.seed] * len(parts)):
            longest = max(longest, seconds)
            for kind, name, oracle, proof, why in results:
                counts[kind]["mutants"] += 1
                counts[kind][oracle] += 1
                if proof == "accepted" and oracle != "right":
                    counts[kind]["missed"] += 1
                    wrong.append(f"missed: {kind}, {name}: {oracle}: {why}")
                elif proof == "refused" and oracle == "right":
                    counts[kind]["right, refused"] += 1
                elif proof not in ("accepted", "refused"):
                    counts[kind]["other error"] += 1
                    wrong.append(f"other error: {kind}, {name}: {proof}")
    seconds = time.perf_counter() - start
    columns = ("mutants", "no plan", "undefined", "wrong", "right", "right, refused", "missed", "other error")
    total: Counter[str] = sum(counts.values(), Counter())
    print("| mutant | " + " | ".join(columns) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for kind, of_kind in [*((kind, counts[kind]) for kind in KINDS), ("**all**", total)]:
        print(f"| {kind} | " + " | ".join(str(of_kind[column]) for column in columns) + " |")
    share = total["right, refused"] / max(1, total["right"])
    print(f"\n{len(plans)} plans, {options.count} mutants, {seconds:.0f} s, the longest {longest:.2f} s")
    print(f"right and yet refused: {total['right, refused']} of {total['right']}, {share:.1%}")
    for line in wrong[:40]:
        print(line)
    if options.json:
        result = {
            "command": f"python tests/mutations/run.py --count {options.count} --seed {options.seed}",
            "plans": len(plans),
            "counts": {kind: dict(counts[kind]) for kind in KINDS},
            "total": dict(total),
            "failures": wrong,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
