"""`lockstep plan`: show what a run needs and whether it fits, before anything is loaded.

lockstep plan run.toml --train.token-budget 8192
lockstep plan --recipe demo
lockstep plan sft --model.name shape:llama-3.1-8b --train.backend fsdp2 --ranks 4
lockstep plan run.toml --gpu "NVIDIA H100 80GB HBM3" --memory-gib 79 --ranks 4
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import tyro

from lockstep.cli.common_model import check_heads, default_ranks
from lockstep.cli.flags import parse_run
from lockstep.config.cluster import ClusterConfig
from lockstep.config.load import recipes
from lockstep.config.run import RunConfig, on_ranks
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from rich.table import Table

    from lockstep.loop.machine import Machine
    from lockstep.loop.memory_plan import MemoryPlan
    from lockstep.loop.resolve import Resolved
    from lockstep.models.memory import MemoryPart, ModelShape

DEFAULT_GPU = "NVIDIA H100 80GB HBM3"
USAGE = """usage: lockstep plan RUN.toml [OPTIONS]
       lockstep plan grpo|ppo|sft|dpo|rm [OPTIONS]
       lockstep plan --recipe NAME [OPTIONS]

Recipes: {recipes}
Every setting of the run is also a flag. `lockstep plan grpo --help` lists the flags.
On a GPU the memory settings that are "auto" are chosen as the run would choose them; the next smaller and
the next faster plan are shown beside the chosen one. The exit status is 1 if the run does not fit."""


class General(TypedDict):
    """Flags of `lockstep plan` that are not settings of the run."""

    recipe: Annotated[str | None, tyro.conf.arg(help="Plan this recipe.", metavar="NAME")]
    json: Annotated[Path | None, tyro.conf.arg(help="Write the plan to this file.", metavar="FILE")]
    memory_gib: Annotated[
        float | None,
        tyro.conf.arg(
            help="Memory per rank to compare with, instead of the free memory here.", metavar="GIB"
        ),
    ]
    gpu: Annotated[
        str | None,
        tyro.conf.arg(
            help="With --memory-gib: plan for GPUs of this name, which need not be here. With train.device = "
            f"'cuda' by default those that are here, else {DEFAULT_GPU}.",
            metavar="NAME",
        ),
    ]
    ranks: Annotated[
        int | None,
        tyro.conf.arg(
            help="Number of ranks, one GPU each. By default as set in [cluster], else one for each visible "
            "GPU.",
            metavar="N",
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """Print the plan; 0 when it fits, 1 when it does not.

    Raises:
        ConfigError: a setting is wrong.
        ModelError: the model's config is not on this machine, or not supported.
    """
    if not argv or argv[0] in ("-h", "--help"):
        echo(USAGE.format(recipes=", ".join(recipes()) or "none"))
        return 0 if argv else 2
    run, general = parse(argv)
    check_writable(general["json"])
    given = general["ranks"]
    if given is None:
        given = default_ranks(run) if run.cluster is None else run.cluster.ranks
    ranks = given
    run = on_ranks(run, ranks)
    import torch

    from lockstep.loop.machine import Machine
    from lockstep.loop.memory_plan import plan_memory
    from lockstep.loop.resolve import resolve
    from lockstep.models.memory import GIB, available_bytes, planned_shape

    check_heads(run)
    if general["memory_gib"] is not None and general["gpu"] is not None and run.model.dtype == "auto":
        echo("model.dtype auto -> bfloat16, on the GPU that is planned for")
        run = run.model_copy(update={"model": run.model.model_copy(update={"dtype": "bfloat16"})})
    device = torch.device(_device(run, general, cuda=torch.cuda.is_available()))
    if (placed := _placed(run, ranks, gpus=device.type == "cuda")) is not None:
        echo("\n".join(placed.draw(run.roles)))
        if device.type == "cuda" and general["memory_gib"] is None:  # else another machine is planned for
            otherwise = "; --memory-gib N plans for another machine, whose GPUs have so much memory"
            placed.check_devices(placed.layout(), there=torch.cuda.device_count(), otherwise=otherwise)
    if general["memory_gib"] is not None:
        available, source = int(general["memory_gib"] * GIB), "given by --memory-gib"
        total = available
    else:
        available, source = available_bytes(device)
        if ranks > 1 and device.type == "cpu":
            available, source = available // ranks, f"a rank's share of {source}"
        total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0
        total = min(total, available) if run.train.plan_for_free else total
    gpu = general["gpu"] or (torch.cuda.get_device_name() if torch.cuda.is_available() else DEFAULT_GPU)
    machine = Machine(device=str(device), ranks=ranks, gpu=gpu, total_bytes=total)
    shape = partial(planned_shape, run.model)
    resolved = resolve(run, shape=shape, machine=machine, manifest={}, refuse=False)
    plan = plan_memory(resolved.run, device=device, ranks=ranks)
    for line in resolved.reasons:
        echo(line)
    beside = _beside(resolved, machine, shape=shape)
    for name, found in beside.items():
        echo(f"  {name}: {found['line']}")
    show(plan, available=available, source=source)
    chosen = {"execution": resolved.execution, "token_budget": resolved.token_budget, "plans": beside}
    result = chosen | as_dict(plan, available=available)
    refusal = resolved.memory.get("refusal")
    if refusal is not None:
        result |= {"fits": False, "refusal": refusal}
    if general["json"] is not None:
        write_json(general["json"], result)
    echo(verdict(plan, available=available) if refusal is None else f"plan: does not fit: {refusal}")
    return 0 if result["fits"] else 1


def _beside(
    resolved: Resolved[Any], machine: Machine, *, shape: Callable[..., ModelShape]
) -> dict[str, dict[str, Any]]:
    """Return the memory plan that was chosen and its neighbours: the fastest of those that need less, and the
    smallest of those that are faster; nothing where no plan was made."""
    import torch

    from lockstep.loop.planner import Candidate, Place, with_settings
    from lockstep.loop.resolve import planner_of
    from lockstep.models.dtypes import resolve_dtype

    settings = resolved.memory.get("settings")
    if not settings:
        return {}
    run = with_settings(resolved.run, dict.fromkeys(settings, "auto"))
    sizes = shape(dtype=resolve_dtype(run.model.dtype, torch.device(machine.device)))
    place = Place(gpu=machine.gpu, total_bytes=machine.total_bytes, ranks=machine.ranks)
    planner = planner_of(run, shape=sizes, place=place)
    tuples = {path: tuple(value) if isinstance(value, list) else value for path, value in settings.items()}
    chosen = next(each for each in planner.candidates() if each.settings == tuples)
    found: dict[str, Candidate | None] = {
        "smallest" if "refusal" in resolved.memory else "chosen": chosen,
        "smaller": planner.fitting(after=[chosen.settings]),
        "faster": None if "refusal" in resolved.memory else planner.faster(chosen),
    }
    return {
        name: {
            "line": each.line(run),
            "settings": dict(each.settings),
            "peak_bytes": each.plan.peak_bytes,
            "seconds": each.seconds,
        }
        for name, each in found.items()
        if each is not None
    }


def _placed(run: RunConfig, ranks: int, *, gpus: bool) -> ClusterConfig | None:
    """Return what to draw: [cluster] if it has that many ranks, else one machine with its remote roles; None
    for nothing."""
    if run.cluster is None or ranks == run.cluster.ranks:
        return run.cluster
    if not run.remote_roles and not run.cluster.engine_gpus:
        return None
    sizes = {"nodes": 1, "gpus": ranks, "slots": 1} if gpus else {"nodes": 1, "gpus": 0, "slots": ranks}
    return run.cluster.model_copy(update=sizes)


def parse(argv: Sequence[str]) -> tuple[RunConfig, dict[str, Any]]:
    """Return the checked run and the values of General. Raises ConfigError."""
    return parse_run(
        argv,
        general=General,
        command="lockstep plan",
        verb="plan",
        description="Show what a run needs and whether it fits.",
    )


def show(plan: MemoryPlan, *, available: int, source: str) -> None:
    """Print sizes, micro-batches and a table of parts for each device."""
    from lockstep.loop.memory_plan import peak_of
    from lockstep.models.memory import gib, phase_totals
    from lockstep.observe.console import PlainConsole

    shape, console = plan.shape, PlainConsole(width=120, highlight=True)
    trained = "" if shape.trained == shape.parameters else f", {shape.trained:,} of them trained (LoRA)"
    console.print(f"parameters: {shape.parameters:,} in {str(plan.dtype).removeprefix('torch.')}{trained}")
    console.print(
        f"one optimizer step: {plan.documents_per_step} documents of at most {plan.longest_document} tokens, "
        f"at most {plan.micro_batches} micro-batches of at most {plan.tokens_per_micro_batch} tokens"
    )
    for place, parts in plan.by_place.items():
        each = f", each of {plan.ranks} ranks" if plan.ranks > 1 else ""
        where = f"the GPU of {place}{each}" if place else f"{plan.device}{each}"
        console.print(_table(parts, title=f"memory on {where}"))
        if len(plan.by_place) > 1:
            peak, phase = peak_of(parts)
            console.print(f"peak there, in phase {phase!r}: {gib(peak)}")
    totals = phase_totals(plan.parts)
    if totals["host"]:
        console.print(f"host memory beside the GPU: {gib(totals['host'])}")
    console.print(f"peak, in phase {plan.peak_phase!r}: {gib(plan.peak_bytes)}; {gib(available)} {source}")


def _table(parts: Sequence[MemoryPart], *, title: str) -> Table:
    from rich.table import Table

    from lockstep.models.memory import gib

    table = Table(title=title)
    for heading, justify in (
        ("part", "left"),
        ("when", "left"),
        ("size", "right"),
        ("made smaller by", "left"),
    ):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    for part in parts:
        table.add_row(part.name, part.phase, gib(part.bytes), part.setting)
    return table


def verdict(plan: MemoryPlan, *, available: int) -> str:
    """The last line."""
    from lockstep.models.memory import explain_oom, gib

    if plan.peak_bytes <= available:
        return f"plan: fits, {gib(plan.peak_bytes)} of {gib(available)}"
    fullest = plan.fullest
    at_peak = [part for part in plan.by_place[fullest] if part.phase in ("always", plan.peak_phase)]
    sizes = f"{gib(plan.peak_bytes)} needed, {gib(available)} available"
    if fullest:
        sizes += f" on the GPU of {fullest}"
    return f"plan: does not fit, {sizes}: {explain_oom(at_peak)}"


def as_dict(plan: MemoryPlan, *, available: int) -> dict[str, Any]:
    """The plan as JSON; sizes in bytes."""
    return {
        "fits": plan.peak_bytes <= available,
        "device": str(plan.device),
        "ranks": plan.ranks,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "parameters": plan.shape.parameters,
        "trained_parameters": plan.shape.trained,
        "documents_per_step": plan.documents_per_step,
        "longest_document": plan.longest_document,
        "tokens_per_micro_batch": plan.tokens_per_micro_batch,
        "micro_batches": plan.micro_batches,
        "peak_bytes": plan.peak_bytes,
        "peak_phase": plan.peak_phase,
        "fullest": plan.fullest,
        "available_bytes": available,
        "parts": [
            {
                "name": p.name,
                "bytes": p.bytes,
                "phase": p.phase,
                "setting": p.setting,
                "role": p.role,
                "place": p.place,
            }
            for p in plan.parts
        ],
    }


def _device(run: RunConfig, general: Mapping[str, Any], *, cuda: bool) -> str:
    named, elsewhere = run.train.device, general["memory_gib"] is not None
    if general["gpu"] is not None:
        if not elsewhere:
            raise ConfigError(
                f"missing-setting: --gpu {general['gpu']!r} says nothing about the memory of such a GPU; set "
                "--memory-gib GIB too"
            )
        if named == "cpu":
            raise ConfigError(
                "contradiction: --gpu plans for a GPU, but train.device = 'cpu'; set one of them"
            )
        return "cuda" if named == "auto" else named
    if named.startswith("cuda") and not (cuda or elsewhere):
        raise ConfigError(
            f"missing-device: train.device = {named!r}, but torch sees no CUDA device; set --train.device "
            "cpu, or plan for another machine, whose GPUs have so much memory: --memory-gib GIB"
        )
    if named != "auto":
        return named
    return "cuda" if cuda else "cpu"
