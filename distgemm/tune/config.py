"""A tuned configuration as a value: what ``schedule="auto"`` selects and records, and what a text can pin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from distgemm.arguments import instance, member, sequence, shown, wrong
from distgemm.gemm import GemmConfig, list_providers
from distgemm.plan import GemmProblem, Plan, make_plan
from distgemm.plan.options import parse_mesh, parse_options, with_hosts
from distgemm.plan.schema import SyncMode
from distgemm.runtime.executable import EXECUTION_FIELDS, ExecutionConfig
from distgemm.runtime.unfused import COLLECTIVES, Collective

__all__ = ["UNFUSED", "Method", "Source", "TunedConfig", "options_for"]

Method = Literal["plan", "unfused"]
Source = Literal["", "measured", "recorded", "predicted", "pinned"]


def options_for(problem: GemmProblem, options: tuple[tuple[str, Any], ...]) -> tuple[tuple[str, Any], ...]:
    """Options of a schedule, with the copies that the problem has."""
    return options if problem.copies == 1 else tuple(sorted((dict(options) | {"copies": problem.copies}).items()))


def _any(name: str, value: Any) -> Any:
    return value


def _execution_config(fields: Mapping[str, Any]) -> ExecutionConfig:
    if fields.get("execution") == "single_kernel":
        raise ValueError("execution=single_kernel is gone: take execution=per_tile, or multi_kernel for other plans")
    return ExecutionConfig(**fields)


@dataclass(frozen=True)
class TunedConfig:
    """How a tensor-parallel GEMM is executed.

    Attributes:
        method: "plan" executes a plan. "unfused" executes the unfused program: a collective and one GEMM.
        schedule: name of the plan's schedule; "" for the unfused program.
        options: options of the schedule and of :func:`distgemm.make_plan`, as (name, value) pairs sorted by name.
        execution: how GPUs execute the plan; with ``config=None`` the shape of each GEMM selects its tiles.
        collective: collective of the unfused program, see :class:`distgemm.runtime.unfused.UnfusedExecutable`; "nccl"
            for a plan.
        source: where the configuration comes from: "measured" now, "recorded" earlier, "predicted" by the cost model,
            "pinned" by the caller, "" if unknown. Not compared.
        fallback: the configuration for what this one does not execute, because per-tile kernels refuse it. None: the
            one that the cost model predicts to be fastest. Not compared.

    Raises:
        ValueError: if a value is unknown, or if values do not go together.
    """

    method: Method = "plan"
    schedule: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    execution: ExecutionConfig = field(default_factory=ExecutionConfig)
    collective: Collective = "nccl"
    source: Source = field(default="", compare=False)
    fallback: TunedConfig | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        wanted = "a tuple of (name, value) pairs, with names as texts and values as integers or texts"
        pairs = sequence("options", self.options, lambda name, pair: sequence(name, pair, _any, wanted, 2), wanted)
        if not all(isinstance(name, str) and isinstance(value, (int, str, tuple)) for name, value in pairs):
            raise wrong("options", wanted, self.options)
        # Sides of a mesh are a text such as "2x4", as texts and files have them.
        texts = ((name, "x".join(map(str, value)) if isinstance(value, tuple) else value) for name, value in pairs)
        object.__setattr__(self, "options", tuple(sorted(texts)))
        member("method", self.method, get_args(Method))
        instance("execution", self.execution, ExecutionConfig, "an ExecutionConfig")
        member("source", self.source, get_args(Source))
        if self.fallback is not None:
            instance("fallback", self.fallback, TunedConfig, "a TunedConfig or None")
        if not isinstance(self.schedule, str):
            raise wrong("schedule", "a string", self.schedule)
        if self.method not in get_args(Method) or (self.method == "plan") != bool(self.schedule):
            raise ValueError(
                "method is 'plan', with a schedule, or 'unfused', without one; "
                f"got {self.method!r} and {self.schedule!r}"
            )
        if self.execution.provider not in (None, *list_providers()):
            raise ValueError(f"provider is one of {', '.join(list_providers())}, got {self.execution.provider!r}")
        if not isinstance(self.collective, str) or self.collective not in (
            COLLECTIVES if self.method == "unfused" else ("nccl",)
        ):
            raise ValueError(
                f"collective is one of {', '.join(COLLECTIVES)} for the unfused program, and 'nccl' for a "
                f"plan; got {shown(self.collective)} for method {self.method!r}"
            )
        if self.execution.config is not None:
            GemmConfig.parse(self.execution.config)

    @property
    def text(self) -> str:
        """The configuration as text, which :meth:`parse` reads.

        Functions and layers accept it in place of a schedule's name.
        """
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused collective={self.collective}"
        default = asdict(ExecutionConfig())
        if self.execution.execution != "multi_kernel" or self.execution.config is not None:
            default["provider"] = "cutlass"
        changed = {name: value for name, value in asdict(self.execution).items() if value != default[name]}
        pairs = [*self.options, *changed.items()]
        texts = (f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in pairs)
        return " ".join([self.schedule, *texts])

    @classmethod
    def parse(cls, text: str, source: Source = "pinned") -> TunedConfig:
        """The configuration that a text names.

        Args:
            text: a schedule's name, options of the plan, and fields of ``execution`` that differ from their defaults,
                as in "gemm+rs chunks=4 provider=cublas". Or "unfused", or with another collective
                "unfused collective=two-shot".
            source: the ``source`` of the configuration.

        Raises:
            ValueError: if the text has another form. An unknown schedule or an unknown option of it raises only when
                the plan is made.
        """
        name, *pairs = (text.split() if isinstance(text, str) else ()) or [""]
        if not name or "=" in name:
            wanted = "a schedule's name and options, as in 'gemm+rs chunks=2 provider=cublas'"
            raise wrong("a configuration", wanted, text)
        options = parse_options(pairs)
        if name == "unfused":
            collective = options.pop("collective", "nccl")
            if options:
                raise ValueError(f"the unfused program has a collective and no {', '.join(options)}: got {text!r}")
            return replace(UNFUSED, collective=collective, source=source)
        execution = {each: options.pop(each) for each in EXECUTION_FIELDS if each in options}
        return cls("plan", name, tuple(options.items()), _execution_config(execution), source=source)

    def option(self, name: str) -> Any:
        """The value of an option; None if it is not given."""
        return dict(self.options).get(name)

    def plan(
        self, problem: GemmProblem, world_size: int, ranks_per_host: int | None = None, sync: SyncMode = "barrier"
    ) -> Plan:
        """The plan of a problem.

        Args:
            problem: the GEMM over all ranks.
            world_size: number of ranks; a ``mesh`` among the options says it, too.
            ranks_per_host: number of ranks that share memory; None: all.
            sync: as in :func:`distgemm.make_plan`, unless the options say it; "barrier" is for the CUDA runtime.

        Raises:
            ValueError: as :func:`distgemm.make_plan`.
        """
        options = with_hosts(self.schedule, self._plan_options(), world_size, ranks_per_host)
        size = None if "mesh" in options else world_size
        return make_plan(problem, self.schedule, size, **({"sync": sync} | options))

    def __str__(self) -> str:
        if self.method == "unfused":
            return "unfused" if self.collective == "nccl" else f"unfused, {self.collective}"
        e = self.execution
        schedule = " ".join([self.schedule, *(f"{key}={value}" for key, value in self.options)])
        if e.execution == "per_tile":
            return f"{schedule}, per-tile kernel{'' if e.config is None else f' {e.config}'}"
        parts = [
            schedule,
            f"GEMMs by {e.provider or 'the default provider'}{'' if e.config is None else f' {e.config}'}",
            f"{e.gemm_streams} GEMM stream{'s' * (e.gemm_streams > 1)}",
        ]
        parts += ["waits by kernel"] * (e.wait_by == "kernel") + ["merged copies"] * e.merge_copies
        return ", ".join(parts)

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments with which :func:`distgemm.compile` makes the same executable again.

        Raises:
            ValueError: for the unfused program.
        """
        if self.method == "unfused":
            raise ValueError("the unfused program has no plan: distgemm.tune.make makes its executable")
        return {"schedule": self.schedule, **asdict(self.execution), **self._plan_options()}

    def _plan_options(self) -> dict[str, Any]:
        """The options, in which a text "mesh=2x2" has become sides."""
        options = dict(self.options)
        if isinstance(options.get("mesh"), str):
            options["mesh"] = parse_mesh(options["mesh"])
        return options

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON stores them."""
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
        """The configuration that :meth:`to_dict` wrote. Ignores further fields.

        Raises:
            ValueError: if a field is missing, or a value is wrong.
        """
        instance("fields", fields, Mapping, "a mapping, as to_dict returns it")
        lacking = {"method"} - set(fields)
        if fields.get("method") == "plan":
            lacking |= {"schedule", "options", *EXECUTION_FIELDS} - set(fields)
        if lacking:
            raise ValueError(f"fields is a mapping, as to_dict returns it; it lacks {sorted(lacking)}")
        if fields["method"] == "unfused":
            return replace(UNFUSED, collective=fields.get("collective", "nccl"), source=source)
        options = fields["options"]
        if not isinstance(options, dict) or not all(isinstance(value, (int, str)) for value in options.values()):
            raise ValueError(f"options map names to integers and strings, got {options!r}")
        execution = _execution_config({name: fields[name] for name in EXECUTION_FIELDS})
        config = execution.config
        if not isinstance(fields["schedule"], str) or not isinstance(config, (str, type(None))):
            raise ValueError(f"schedule and config are strings, got {fields['schedule']!r} and {config!r}")
        fallback = cls.from_dict(fields["fallback"], source) if "fallback" in fields else None
        pairs = tuple(options.items())
        return cls(fields["method"], fields["schedule"], pairs, execution, source=source, fallback=fallback)


UNFUSED = TunedConfig("unfused", execution=ExecutionConfig("cublas", gemm_streams=1))
