"""Plans and lowerings are those of the baseline, and a change of one number in them changes the digest."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import distgemm
from distgemm import GemmProblem, make_plan
from distgemm.schedulers import schedule_options
from tests.equivalence.digests import (
    BASELINE,
    RENAMES,
    Flattener,
    Group,
    Variant,
    cases,
    differences,
    digest,
    make_digests,
    new_code,
    options_of,
    sample,
)


def test_a_sample_equals_the_baseline() -> None:
    wanted = sample(json.loads(BASELINE.read_text())["groups"], 6, seed=258)
    assert differences(wanted, make_digests([Group.parse(name) for name in wanted])) == []


def test_every_schedule_has_cases() -> None:
    """Also one that is newer than the baseline, with options of its own."""
    for name in distgemm.list_schedules():
        assert next(options_of(new_code(), name)).keys() == schedule_options(name).keys()


def changes(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Copies of a value in which one number is changed, or one element of a list is missing; and its path."""
    if isinstance(value, (bool, int)):
        yield at, not value if isinstance(value, bool) else value + 1
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            for path, other in changes(getattr(value, field.name), f"{at}.{field.name}"):
                yield path, dataclasses.replace(value, **{field.name: other})
    elif hasattr(value, "_fields"):
        for name in value._fields:
            for path, other in changes(getattr(value, name), f"{at}.{name}"):
                yield path, value._replace(**{name: other})
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            before, behind = value[:index], value[index + 1 :]
            if before or behind:
                yield f"{at}[{index}]", before + behind
            for path, other in changes(each, f"{at}[{index}]"):
                yield path, before + type(value)([other]) + behind


def changed_fields(value: Any) -> set[str]:
    """Paths without indices of all changes of a plan or of actions. Each must change the digest."""
    path_of = new_code().path
    before = digest(Flattener(path_of).lines(value))
    found = set()
    for path, other in changes(value):
        assert digest(Flattener(path_of).lines(other)) != before, path
        found.add(re.sub(r"\[\d+\]", "", path))
    return found


def test_every_change_of_a_plan_changes_its_digest() -> None:
    plan = make_plan(GemmProblem(64, 64, 64), "reduce_scatter_1d_pairwise_a", 2, workspace="bounded")
    fields = changed_fields(plan)
    assert {".rank_ops.deps", ".rank_ops.flag.number", ".slots.offset", ".rank_ops.src.slot"} <= fields


def test_every_change_of_a_lowering_changes_its_digest() -> None:
    plan = make_plan(GemmProblem(64, 64, 4096), "reduce_scatter_1d_pairwise_a", 2)
    fields = {".ops.deps", ".ops.flag.number", ".after", ".stream"}
    assert fields <= changed_fields(new_code().lower(plan, 0, Variant()))


def test_what_writes_no_line() -> None:
    def lines(value: Any) -> list[str]:
        return Flattener(lambda path: path).lines([value])

    assert lines(((1, 2), None)) == ["tuple[0].length = 2", "tuple[0][0][0] = 1", "tuple[0][0][1] = 2"]
    assert lines((None, 1)) == lines(((), 1)) == ["tuple[0][1] = 1"]
    assert lines((None,)) != lines((None, None))
    with pytest.raises(TypeError, match="is a dict, which has no lines"):
        lines(({},))


def test_the_table_gives_a_name_once() -> None:
    for table in (RENAMES["arguments"], RENAMES["fields"], *RENAMES["values"].values()):
        assert len(set(table.values())) == len(table)


def test_a_group_tries_all_combinations() -> None:
    every = list(cases(new_code(), Group("tensor_parallel_2d_rs", (2, 2), "push")))
    assert len({case.text for case in every}) == len(every) == 4 * 4 * 2 * 15 * 16
