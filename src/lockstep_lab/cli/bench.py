"""`lockstep bench step`: measure the cost of one RL step in several configurations.

lockstep bench step --model shape:llama-3.2-1b --execution eager,compile --engine hf,native
lockstep bench step --cells compile+native,compile+native+invariant --repeats 9
lockstep bench step --model shape:tiny-llama --cells eager+hf,fsdp2+eager+hf --ranks 2
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, positive, ranks, seconds, seed
from lockstep.config.declarations import backends
from lockstep.errors import ConfigError
from lockstep.loop.preflight import check_model
from lockstep.observe.files import check_writable
from lockstep_lab.cli.suites import conclude, run_command, say
from lockstep_lab.step_bench.cells import AXES, AXIS_OF, BenchCell, parse_cells, product

if TYPE_CHECKING:
    from lockstep_lab.step_bench.job import BenchWork
    from lockstep_lab.step_bench.run import BenchOptions

FLAG_OF: Mapping[str, str] = {
    "steps": "--repeats and --warmup",
    "model.name": "--model",
    "model.dtype": "--dtype",
    "model.num_layers": "--num-layers",
    "data.max_prompt_tokens": "--prompt-tokens",
    "rollout.prompts_per_step": "--prompts",
    "rollout.group_size": "--group",
    "rollout.sampling.max_tokens": "--longest",
    "train.attention": "--attention",
    "train.device": "--device",
    "train.token_budget": "--token-budget",
    **{setting: f"--cells or --{axis}" for setting, axis in AXIS_OF.items()},
}
"""Setting of lockstep train grpo that --set leaves alone -> the flags that decide it."""
MOST_TOKENS = 8192
"""Token budget of a micro-batch without --token-budget."""
MOST_SAMPLES = 65_536
"""The most samples: more are a mistake in --prompts or --group."""


def main(argv: Sequence[str]) -> int:
    """0: every cell was measured or refused, the first one measured; 1: otherwise; 130: Ctrl-C.

    Raises:
        ConfigError: a wrong setting, or settings that are refused in every cell; nothing was started.
    """
    commands = {
        "step": (
            "measure forward, backward, optimizer step and generation of one RL step, cell by cell",
            step,
        )
    }
    return run_command("bench", __doc__, commands, argv)


def parser() -> argparse.ArgumentParser:
    """Every flag of `lockstep bench step`."""
    parser = arguments.command_parser(
        "lockstep bench step",
        "Measure one RL step with the same work in several configurations (cells). Each cell runs in its "
        "own processes.\nThe cells take turns, and times are relative to the first cell.\n\n"
        "A cell has a name such as fsdp2+compile+native+invariant: values of backend, execution and "
        "engine, and the\nword `invariant`, joined by +.",
        epilog="Exit status 0: the first cell was measured, and every other cell was measured or refused. 1: "
        "a cell failed,\nran out of memory or hung, or the first cell was refused. 2: a setting is wrong, or "
        "all cells were refused before a\nprocess was started. In that case, nothing is written.",
    )
    cells = Flags(parser, "which cells")
    cells.value("--cells", "LIST", "comma-separated cells, in this order (eager+hf)")
    for axis, values in AXES.items():
        cells.value(
            f"--{axis}", "LIST", f"some of {', '.join(values)}; all combinations are measured ({values[0]})"
        )
    cells.value("--ranks", ranks, "number of ranks for backends that support several (all GPUs, or 2)")
    cells.choice("--device", ["auto", "cpu", "cuda"], default="auto")
    _work_flags(Flags(parser, "work"))
    _output_flags(Flags(parser, "measuring and output"))
    return parser


def _work_flags(work: Flags) -> None:
    work.value("--model", "NAME", default="shape:tiny-llama")
    work.value("--num-layers", positive, "use only the first N layers")
    work.choice("--dtype", ["auto", "float32", "bfloat16"], "dtype, as for model.dtype", "auto")
    work.value(
        "--attention", "NAME", "kernel, as for train.attention; auto: varlen if any cell is invariant", "auto"
    )
    work.value("--prompts", positive, "prompts per step", 8)
    work.value("--group", positive, "samples per prompt", 4)
    work.value("--prompt-tokens", positive, "tokens per prompt", 32)
    work.value(
        "--longest",
        positive,
        "maximum length of prompt plus completion, in tokens; lengths are lognormal, as in RL",
        512,
    )
    work.value(
        "--token-budget", positive, "token budget of a micro-batch (the whole step, up to 8192, or --longest)"
    )
    work.value("--seed", seed, default=0)
    work.many(
        "--set",
        "NAME=VALUE",
        "set another setting of lockstep train grpo in all cells, such as engine.max_batch=64 (repeatable)",
    )


def _output_flags(output: Flags) -> None:
    output.value("--repeats", positive, "measured steps per cell", 5)
    output.value("--warmup", positive, "warm-up steps per cell", 2)
    output.switch(
        "--one-at-a-time", "finish each cell before the next one starts, if two do not fit into memory"
    )
    output.switch("--fresh-cache", "compile everything again, even if this machine has compiled it before")
    output.value("--timeout", seconds, "deadline for a cell's start and for each of its steps", 600.0)
    output.results("bench")


def step(argv: Sequence[str]) -> int:
    """`lockstep bench step`."""
    args = parser().parse_args(list(argv))
    check_model(args.model, setting="--model")
    options = make_options(args, command=shlex.join(["lockstep", "bench", "step", *argv]))
    check_writable(args.json)
    from lockstep_lab.step_bench.report import report
    from lockstep_lab.step_bench.run import run_bench
    from lockstep_lab.suite.report import write_report

    result = run_bench(options, progress=arguments.nothing if args.quiet else say)
    described = report(result)
    write_report(described, result.as_dict(), options.out, "bench")
    return conclude(result, described, args, f"{options.out}/bench.html, bench.md, bench.json")


def make_options(args: argparse.Namespace, *, command: str = "") -> BenchOptions:
    """The options of the flags.

    Raises:
        ConfigError: a value that cannot be right, named with its flag.
    """
    from lockstep.loop.resolve import resolve_attention
    from lockstep_lab.cli.parity import device_of
    from lockstep_lab.step_bench.run import BenchOptions

    cells = _cells(args)
    spanning = [name for name, backend in backends().items() if backend.spans_ranks]
    if (args.ranks or 1) > 1 and not any(cell.backend in spanning for cell in cells):
        names = ", ".join(cell.name for cell in cells)
        raise ConfigError(
            f"no-effect: --ranks {args.ranks} has no effect with {names}: backend {cells[0].backend} runs in "
            f"one process; add a cell of {' or '.join(spanning)}, or leave --ranks out"
        )
    device, gpus = device_of(args.device)
    work = _work(args)
    notes = []
    attention = args.attention
    if attention == "auto" and any(cell.invariant for cell in cells):
        attention = resolve_attention(attention, device=device, dtype=args.dtype, batch_invariant=True)
        notes.append("attention auto -> varlen in all cells, because one of them is invariant")
    return arguments.options(
        BenchOptions,
        args,
        cells=cells,
        run=_run(args, work=work, device=device, attention=attention),
        out=args.out or arguments.default_out("bench"),
        work=work,
        device=device,
        ranks=args.ranks or gpus or 2,
        overrides=_overrides(args.set),
        notes=notes,
        command=command,
    )


def _cells(args: argparse.Namespace) -> list[BenchCell]:
    lists = {axis: getattr(args, axis) for axis in AXES}
    if args.cells is None:
        return product(lists)
    lists_given = [axis for axis, text in lists.items() if text is not None]
    if lists_given:
        raise ConfigError(
            f"contradiction: --cells and --{lists_given[0]} exclude each other; give the cells, or lists of "
            "values"
        )
    return parse_cells(args.cells)


def _work(args: argparse.Namespace) -> BenchWork:
    from lockstep.config.load import check
    from lockstep_lab.step_bench.job import BenchWork

    if args.prompts * args.group > MOST_SAMPLES:
        raise ConfigError(
            f"out-of-range: --prompts {args.prompts} x --group {args.group} is more than {MOST_SAMPLES} "
            "samples; lower one"
        )
    names = ("prompts", "group", "prompt_tokens", "longest", "seed")
    values = {name: getattr(args, name) for name in names}
    return check(values, BenchWork, origin=", ".join(f"--{name.replace('_', '-')}" for name in names))


def _run(args: argparse.Namespace, *, work: BenchWork, device: str, attention: str) -> Any:
    """The run that all cells share, as one of `lockstep train grpo`."""
    from lockstep.config.load import load_run

    budget = args.token_budget or max(args.longest, min(sum(work.lengths()), MOST_TOKENS))
    if budget < args.longest:
        raise ConfigError(
            f"contradiction: --token-budget {budget} is below --longest {args.longest}: a document must fit "
            "in one micro-batch"
        )
    settings: dict[str, Any] = {
        "name": "bench",
        "steps": args.warmup + args.repeats,
        "model.name": args.model,
        "model.dtype": args.dtype,
        "data.source": "ids",
        "data.task": {"min_tokens": 1, "max_tokens": min(16, work.prompt_tokens)},
        "data.max_prompt_tokens": work.prompt_tokens,
        "rewards": [{"name": "ids"}],
        "rollout.prompts_per_step": work.prompts,
        "rollout.group_size": work.group,
        "rollout.sampling.max_tokens": work.longest - work.prompt_tokens,
        "rollout.sampling.ignore_eos": True,
        "algorithm.name": "grpo" if work.group > 1 else "reinforce++",
        "train.attention": attention,
        "train.device": device,
        "train.token_budget": budget,
    }
    if args.num_layers is not None:
        settings["model.num_layers"] = args.num_layers
    return load_run(kind="grpo", overrides=settings)


def _overrides(words: Sequence[str]) -> dict[str, Any]:
    from lockstep.config.load import parse_value

    overrides = {}
    for word in words:
        name, text = arguments.pair("--set", word, example="engine.max_batch=64")
        _check_settable(name)
        overrides[name] = parse_value(text, origin=f"--set {name}")
    return overrides


def _check_settable(name: str) -> None:
    if name in FLAG_OF:
        what = "an axis of cells" if name in AXIS_OF else "part of what is measured"
        raise ConfigError(f"contradiction: --set {name} is {what}; choose it with {FLAG_OF[name]}")
    inside = next((setting for setting in FLAG_OF if setting.startswith(f"{name}.")), None)
    if inside is not None:
        raise ConfigError(
            f"contradiction: --set {name} would also replace {inside}, which {FLAG_OF[inside]} sets; set the "
            f"values in {name} one by one: --set {name}.NAME=VALUE"
        )
