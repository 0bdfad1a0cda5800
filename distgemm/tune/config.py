"""How a product is done, as a value: what ``schedule="auto"`` chooses, records and pins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any

from distgemm.gemm import GemmConfig, list_providers
from distgemm.plan.derive import make_plan
from distgemm.plan.options import parse_options
from distgemm.plan.plan import Plan
from distgemm.plan.problem import GemmProblem
from distgemm.runtime.checks import Execution
from distgemm.runtime.unfused import COLLECTIVES

__all__ = ["UNFUSED", "Choice"]


@dataclass(frozen=True)
class Choice:
    """How a product is done.

    method:   "plan", or "unfused": a collective and one product
    schedule, options: of the plan, options as (name, value) pairs, by name
    execution: how GPUs execute it; config None: by shape, for each GEMM
    collective: of the unfused program, as :class:`distgemm.runtime.unfused.UnfusedExecutable` takes it
    how:      it came about: "measured" just now, "recorded" earlier, "predicted" by the cost model, "pinned" by the
              caller, "" unknown. No part of what is compared
    otherwise: of one kernel for all GEMMs, what is done where the rows are in no equal chunks; None: what is predicted
              to be fastest. No part of what is compared
    """

    method: str = "plan"
    schedule: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    execution: Execution = field(default_factory=Execution)
    collective: str = "nccl"
    how: str = field(default="", compare=False)
    otherwise: Choice | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", tuple(sorted(self.options)))
        if self.method not in ("plan", "unfused") or (self.method == "plan") != bool(self.schedule):
            raise ValueError(
                f"method is 'plan', with a schedule, or 'unfused', without; got {self.method!r} and {self.schedule!r}"
            )
        if self.execution.provider not in list_providers():
            raise ValueError(f"provider is one of {', '.join(list_providers())}, got {self.execution.provider!r}")
        if self.collective not in (COLLECTIVES if self.method == "unfused" else ("nccl",)):
            raise ValueError(f"collective is one of {', '.join(COLLECTIVES)}, of no plan, got {self.collective!r}")
        if self.execution.config is not None:
            GemmConfig.parse(self.execution.config)

    @property
    def text(self) -> str:
        """What :meth:`parse` reads. It may stand where ops and layers take a schedule's name."""
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused collective={self.collective}"
        how = {name: value for name, value in asdict(self.execution).items() if value != getattr(Execution, name)}
        pairs = [*self.options, *how.items()]
        return " ".join([self.schedule, *(f"{name}={str(value).lower()}" for name, value in pairs)])

    @classmethod
    def parse(cls, text: str, how: str = "pinned") -> Choice:
        """A schedule's name, options of its plan and fields of ``execution`` that are not the usual ones, as in
        "gemm+rs chunks=4 provider=cublas"; or "unfused", with another collective than NCCL's as
        "unfused collective=two-shot". Raises ValueError for what is none of these; whether a schedule and its options
        are known shows when a plan is made."""
        name, *words = text.split() or [""]
        if not name or "=" in name:
            raise ValueError(
                f"a choice is a schedule's name and options, as in 'gemm+rs chunks=2 provider=cublas', got {text!r}"
            )
        options = parse_options(words)
        if name == "unfused":
            collective = options.pop("collective", "nccl")
            if options:
                raise ValueError(f"the unfused program has a collective, and no {', '.join(options)}: got {text!r}")
            return replace(UNFUSED, collective=collective, how=how)
        execution = {each.name: options.pop(each.name) for each in dataclass_fields(Execution) if each.name in options}
        return cls("plan", name, tuple(options.items()), Execution(**execution), how=how)

    @property
    def by_one_kernel(self) -> bool:
        """Whether all GEMMs are one kernel, which waits by itself."""
        return self.execution.waits == "gemm"

    def option(self, name: str) -> Any:
        """The value of a schedule's option; None where it is not given."""
        return dict(self.options).get(name)

    def plan(self, problem: GemmProblem, world_size: int) -> Plan:
        """The plan of a problem, as the CUDA runtime takes it. Raises ValueError as :func:`distgemm.make_plan`."""
        return make_plan(problem, self.schedule, world_size, sync="barrier", **dict(self.options))

    def __str__(self) -> str:
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused, {self.collective}"
        how, name = self.execution, " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options)])
        config = "" if how.config is None else f" {how.config}"
        waits = "" if how.waits == "memory" else f", waits by {how.waits}"
        merged = ", chunks merged" if how.merge else ""
        branches = f"{how.branches} branch{'es' * (how.branches > 1)}"
        copies = "" if how.copies == "engine" else f", copies by {how.copies}"
        return f"{name}{merged}, GEMMs by {how.provider}{config}, {branches}{waits}{copies}"

    def arguments(self) -> dict[str, Any]:
        """What :func:`distgemm.compile` takes, beside the problem, to make the same again. Raises ValueError for the
        unfused program, which is :class:`distgemm.runtime.unfused.UnfusedExecutable`."""
        if self.method == "unfused":
            raise ValueError("the unfused program is no plan: distgemm.runtime.unfused.UnfusedExecutable makes it")
        return {"schedule": self.schedule, **asdict(self.execution), **dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        """As JSON knows it."""
        if self.method == "unfused":
            return {"method": "unfused", "collective": self.collective}
        found = {
            "method": "plan",
            "schedule": self.schedule,
            "options": dict(self.options),
            **asdict(self.execution),
        }
        return found if self.otherwise is None else found | {"otherwise": self.otherwise.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], how: str = "") -> Choice:
        """What :meth:`to_dict` wrote; further fields are passed over. Raises ValueError, KeyError or TypeError."""
        if fields["method"] == "unfused":
            return replace(UNFUSED, collective=fields.get("collective", "nccl"), how=how)
        options = fields["options"]
        if not isinstance(options, dict) or not all(isinstance(value, (int, str)) for value in options.values()):
            raise ValueError(f"options are numbers and texts by name, got {options!r}")
        execution = Execution(**{each.name: fields[each.name] for each in dataclass_fields(Execution)})
        config = execution.config
        if not isinstance(fields["schedule"], str) or not isinstance(config, (str, type(None))):
            raise ValueError(f"schedule and config are texts, got {fields['schedule']!r} and {config!r}")
        otherwise = cls.from_dict(fields["otherwise"], how) if "otherwise" in fields else None
        pairs = tuple(options.items())
        return cls(fields["method"], fields["schedule"], pairs, execution, how=how, otherwise=otherwise)


UNFUSED = Choice("unfused", execution=Execution("cublas", branches=1))
