"""Anchors of a resumed benchmark: rows that are measured again, so that new rows can be compared with old ones.

Imports no torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from distgemm.bench.cases import Case, Job, parse_candidate
from distgemm.bench.report import AUTO, OURS, Result, Row, label, percent

__all__ = ["ANCHOR_TOLERANCE", "compare_anchors", "job_of", "resumed", "select_anchors"]

ANCHOR_TOLERANCE = 0.02
"""Largest difference from 1 of an anchor's new time / old time."""


def _times(row: Row) -> dict[str, float]:
    """The time of each method of a row with figures, ms; without methods that failed or were wrong."""
    return {each["name"]: each["ms"] for each in row["methods"] if each["ms"] and not each["error"]}


def select_anchors(rows: Sequence[Row]) -> list[Row]:
    """The first, the middle and the last row that have times; all of them if there are fewer than three."""
    timed = [row for row in rows if _times(row)]
    return timed if len(timed) < 3 else [timed[0], timed[len(timed) // 2], timed[-1]]


def job_of(row: Row) -> Job:
    """The case of a row, and its configurations that have a time; without those whose schedules no longer exist."""
    case = Case(**{name: row[name] for name in Case._fields if name in row})
    times, candidates = _times(row), []
    for each in row["methods"]:
        if each["kind"] == OURS and each["name"] != AUTO and each["name"] in times:
            with contextlib.suppress(ValueError):
                candidates.append(parse_candidate(each["name"]))
    return Job(case, tuple(candidates))


def compare_anchors(pairs: Iterable[tuple[Row, Row]]) -> list[dict[str, Any]]:
    """Compare anchors with what they were.

    Args:
        pairs: each anchor as the file has it, and as it is measured now.

    Returns:
        Of each anchor its label, ``row``, and ``ratio``: the median of new time / old time over the methods that have a
        time in both.

    Raises:
        ValueError: if a ratio differs from 1 by more than ``ANCHOR_TOLERANCE``, or no method has a time in both.
    """
    found = []
    advice = "measure on the machine as before, or start a new file"
    for old, new in pairs:
        before, now = _times(old), _times(new)
        ratios = [now[name] / before[name] for name in before if name in now]
        if not ratios:
            raise ValueError(f"{label(old)} was measured again, and no method has a time in both runs: {advice}")
        ratio = median(ratios)
        if not abs(ratio - 1) <= ANCHOR_TOLERANCE:
            raise ValueError(
                f"{label(old)} was measured again, and takes {ratio:.4f} times as long as in the file; it may differ "
                f"by {percent(ANCHOR_TOLERANCE)}: {advice}"
            )
        found.append({"row": label(old), "ratio": round(ratio, 4)})
    return found


def resumed(result: Result, before: Result, anchors: list[dict[str, Any]]) -> Result:
    """The result of a resumed run before its first row: rows and facts of ``before``, and its own in "resumptions"."""
    facts = {name: result[name] for name in ("date", "command", "about")}
    return {
        **result,
        **{name: before[name] for name in facts if name in before},
        "planned": len(before["rows"]) + result["planned"],
        "resumptions": [*before.get("resumptions", []), {**facts, "anchors": anchors}],
        "rows": [*before["rows"]],
    }
