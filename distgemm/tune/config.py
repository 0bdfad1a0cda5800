"""A tuned configuration: what ``schedule="auto"`` selects, records and pins, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from distgemm.gemm import GemmConfig, list_providers
from distgemm.plan import GemmProblem, Plan, make_plan
from distgemm.plan.options import parse_mesh, parse_options
from distgemm.runtime.executable import EXECUTION_FIELDS, ExecutionConfig
from distgemm.runtime.unfused import COLLECTIVES, Collective

__all__ = ["UNFUSED", "Source", "TunedConfig"]

Source = Literal["", "measured", "recorded", "predicted", "pinned"]


@dataclass(frozen=True)
class TunedConfig:
    """How a product is executed.

    Attributes:
        method: "plan", or "unfused": a collective and one GEMM.
        schedule: of the plan; "" for the unfused program.
        options: of the schedule and of :func:`distgemm.make_plan`, as (name, value) pairs, sorted by name.
        execution: how GPUs execute the plan; with ``config=None`` the shape decides for each GEMM.
        collective: of the unfused program, see :class:`distgemm.runtime.unfused.UnfusedExecutable`.
        source: where it comes from: "measured" just now, "recorded" earlier, "predicted" by the cost model, "pinned"
            by the caller, "" unknown. Not compared.
        fallback: what is executed where the rows do not divide into equal chunks, which the fused kernel needs; None:
            what the cost model predicts to be fastest. Not compared.

    Raises:
        ValueError: if values are unknown or do not go together.
    """

    method: Literal["plan", "unfused"] = "plan"
    schedule: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    collective: Collective = "nccl"
    source: Source = field(default="", compare=False)
    fallback: TunedConfig | None = field(default=None, compare=False, repr=False)

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
        changed = {
            name: value for name, value in asdict(self.execution).items() if value != getattr(ExecutionConfig, name)
        }
        pairs = [*self.options, *changed.items()]
        return " ".join([self.schedule, *(f"{name}={str(value).lower()}" for name, value in pairs)])

    @classmethod
    def parse(cls, text: str, source: Source = "pinned") -> TunedConfig:
        """The configuration that a text names.

        The text has a schedule's name, options of the plan and fields of ``execution`` that differ from their defaults,
        as in "gemm+rs chunks=4 provider=cublas". Or it is "unfused", with another collective than NCCL's as
        "unfused collective=two-shot". Whether the schedule and its options are known shows when a plan is made.

        Raises:
            ValueError: if the text has another form.
        """
        name, *words = text.split() or [""]
        if not name or "=" in name:
            raise ValueError(
                "a configuration is a schedule's name and options, as in 'gemm+rs chunks=2 provider=cublas', "
                f"got {text!r}"
            )
        options = parse_options(words)
        if name == "unfused":
            collective = options.pop("collective", "nccl")
            if options:
                raise ValueError(f"the unfused program has a collective, and no {', '.join(options)}: got {text!r}")
            return replace(UNFUSED, collective=collective, source=source)
        execution = {each: options.pop(each) for each in EXECUTION_FIELDS if each in options}
        return cls("plan", name, tuple(options.items()), ExecutionConfig(**execution), source=source)

    def option(self, name: str) -> Any:
        """The value of an option; None where it is not given."""
        return dict(self.options).get(name)

    def plan(self, problem: GemmProblem, world_size: int) -> Plan:
        """The plan of a problem, as the CUDA runtime takes it. Raises ValueError as :func:`distgemm.make_plan`."""
        options = dict(self.options)
        size = None if "mesh" in options else world_size
        if isinstance(options.get("mesh"), str):  # "mesh=2x2" in a text
            options["mesh"] = parse_mesh(options["mesh"])
        return make_plan(problem, self.schedule, size, **({"sync": "barrier"} | options))

    def __str__(self) -> str:
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused, {self.collective}"
        e = self.execution
        parts = [
            " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options)]),
            f"GEMMs by {e.provider}{'' if e.config is None else f' {e.config}'}",
            f"{e.gemm_streams} GEMM stream{'s' * (e.gemm_streams > 1)}",
        ]
        parts += ["fused kernel"] * e.single_kernel + ["waits by kernel"] * (e.wait_by == "kernel")
        parts += ["merged copies"] * e.merge_copies + [f"transport {e.transport}"] * (e.transport != "copy_engine")
        return ", ".join(parts)

    def arguments(self) -> dict[str, Any]:
        """What :func:`distgemm.compile` takes, beside the problem, to make the same again.

        Raises:
            ValueError: for the unfused program, which is :class:`distgemm.runtime.unfused.UnfusedExecutable`.
        """
        if self.method == "unfused":
            raise ValueError("the unfused program is no plan: distgemm.runtime.unfused.UnfusedExecutable makes it")
        return {"schedule": self.schedule, **asdict(self.execution), **dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON holds them."""
        if self.method == "unfused":
            return {"method": "unfused", "collective": self.collective}
        found = {
            "method": "plan",
            "schedule": self.schedule,
            "options": dict(self.options),
            **asdict(self.execution),
        }
        return found if self.fallback is None else found | {"fallback": self.fallback.to_dict()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], source: Source = "") -> TunedConfig:
        """What :meth:`to_dict` wrote; further fields are ignored.

        Raises:
            ValueError, KeyError, TypeError: if a field is missing or wrong.
        """
        if fields["method"] == "unfused":
            return replace(UNFUSED, collective=fields.get("collective", "nccl"), source=source)
        options = fields["options"]
        if not isinstance(options, dict) or not all(isinstance(value, (int, str)) for value in options.values()):
            raise ValueError(f"options are numbers and texts by name, got {options!r}")
        execution = ExecutionConfig(**{name: fields[name] for name in EXECUTION_FIELDS})
        config = execution.config
        if not isinstance(fields["schedule"], str) or not isinstance(config, (str, type(None))):
            raise ValueError(f"schedule and config are texts, got {fields['schedule']!r} and {config!r}")
        fallback = cls.from_dict(fields["fallback"], source) if "fallback" in fields else None
        pairs = tuple(options.items())
        return cls(fields["method"], fields["schedule"], pairs, execution, source=source, fallback=fallback)


UNFUSED = TunedConfig("unfused", execution=ExecutionConfig("cublas", gemm_streams=1))
