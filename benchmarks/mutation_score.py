"""How many mutations of plans the model checker catches.

    python benchmarks/mutation_score.py [--ranks 3] [--chunks 1] [--json FILE]

Every single mutation of the plans of all 1D schedules, with both workspaces and both ways to synchronise.
Whether a mutation matters is decided by brute force, independently of the checker: see docs/verify.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import distgemm
from distgemm import GemmProblem, PlanError
from distgemm.schedulers import schedule_mesh_rank
from tests.unit.mutations import KINDS, Effect, Mutation, changed, effect, mutations

REASONS = {
    "drop a dependency": "others imply it",
    "swap two tiles": "both were ready: same products, same sums",
    "swap two transfers": "both parts are waited for together",
    "swap two ops in the list": "no order between them; list order is not an order of execution",
    "move a place to a new slot": "a place of its own: nothing else is there",
    "change a flag": "both are waited for together, by the same rank from the same rank",
}
"""Why a mutation of this kind can leave order and data flow as they were."""


def judge(mutation: Mutation, before: Effect) -> str:
    """What became of a mutation."""
    after = effect(mutation.plan)
    matters = changed(before, after)
    try:
        mutation.plan.verify()
    except PlanError:
        return "caught" if matters else "contradiction"
    if not matters:
        return "equivalent"
    return "slack" if after.fault is None else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=3, help="world size (pairwise xor: the power of two below)")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    options = parser.parse_args()
    start = time.perf_counter()
    score: dict[str, Counter[str]] = defaultdict(Counter)
    missed: list[str] = []
    plans = 0
    for name, workspace, sync in product(distgemm.list_schedules(), ("full", "bounded"), ("credit", "barrier")):
        ranks = 1 << options.ranks.bit_length() - 1 if "xor" in name else options.ranks
        mesh = {1: (ranks,), 2: (2, 2), 3: (2, 1, 2)}[schedule_mesh_rank(name)]
        schedule = distgemm.get_schedule(name, mesh=mesh, chunks=options.chunks)
        m, n, k, _ = schedule.grid
        problem = GemmProblem(m=2 * m, n=n, k=k)
        plan = distgemm.make_plan(problem, schedule, workspace=workspace, sync=sync)
        before = effect(plan)
        plans += 1
        for mutation in mutations(plan):
            became = judge(mutation, before)
            score[mutation.kind][became] += 1
            if became == "missed":
                missed.append(f"{name}, {workspace}, {sync}: {mutation.kind}: {mutation.what}")
    seconds = time.perf_counter() - start

    columns = ("caught", "missed", "slack", "equivalent", "contradiction")
    table = Table(title=f"{plans} plans, {options.ranks} ranks or a mesh, chunks {options.chunks}, {seconds:.0f} s")
    table.add_column("mutation")
    for column in ("generated", *columns):
        table.add_column(column, justify="right")
    table.add_column("why equivalent")
    total: Counter[str] = Counter()
    for kind in KINDS:
        counts = score[kind]
        total += counts
        why = REASONS.get(kind, "") if counts["equivalent"] else ""
        table.add_row(kind, str(counts.total()), *(str(counts[column]) for column in columns), why)
    table.add_section()
    table.add_row("all", str(total.total()), *(str(total[column]) for column in columns))
    console = Console(width=140)
    console.print(table)
    share = total["caught"] / max(total["caught"] + total["missed"], 1)
    console.print(f"mutation score: {total['caught']} of {total['caught'] + total['missed']} ({share:.1%})")
    for line in missed:
        console.print(f"missed: {line}")
    if options.json:
        found = {
            "command": f"python benchmarks/mutation_score.py --ranks {options.ranks} --chunks {options.chunks}",
            "plans": plans,
            "score": share,
            "kinds": {
                kind: {"generated": score[kind].total(), **{column: score[kind][column] for column in columns}}
                for kind in KINDS
            },
            "total": {"generated": total.total(), **{column: total[column] for column in columns}},
            "reasons": REASONS,
            "missed": missed,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
