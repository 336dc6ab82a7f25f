"""`lockstep parity`: compare train stacks that must take the same steps, and engines that must answer alike.

lockstep parity train --stacks deepspeed:zero2,fsdp2,fsdp2:ring2 --max-samples 64
lockstep parity compare runs/a runs/b --threshold 0.05 --plot both.png
lockstep parity check --model bundled:smollm2-135m
lockstep parity engines --engines hf,vllm --python vllm=.venv-vllm/bin/python
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, above_zero, path, positive, ranks, seconds, seed
from lockstep.config.algorithm import PREFERENCES
from lockstep.config.declarations import backends
from lockstep.errors import ConfigError
from lockstep.loop.preflight import check_model
from lockstep.observe.files import check_writable
from lockstep_lab.cli.suites import Commands, conclude, run_command, say
from lockstep_lab.train_parity.stacks import (
    DEFAULT_STACKS,
    OPTIONS,
    SKIP_WORDS,
    parse_skip,
    parse_stack,
    parse_stacks,
)

if TYPE_CHECKING:
    from lockstep.config.model import ModelConfig
    from lockstep_lab.train_parity.run import ParityOptions

ENVIRONMENT: Mapping[str, tuple[str, str]] = {
    "NUM_GPUS": ("gpus", "--gpus"),
    "MAX_SAMPLES": ("max_samples", "--max-samples"),
    "MODEL": ("model", "--model"),
    "DATASET": ("dataset", "--dataset"),
    "OUTPUT_DIR": ("out", "--out"),
    "LOG_DIR": ("log_dir", "--log-dir"),
}
"""Variable -> (argument, flag). TP_SIZE, RING_SIZE and SKIP_* are read as well."""
_SKIP = "SKIP_"


def main(argv: Sequence[str]) -> int:
    """0: everything agrees; 1: something does not, or failed; 130 after Ctrl-C.

    Raises:
        ConfigError: a wrong setting, before anything is trained.
    """
    commands: Commands = {
        "train": ("train each stack in its own processes and compare every step", train),
        "compare": ("compare the losses of two runs", partial(_other, "compare")),
        "check": ("check what this installation can train with; needs no GPU", partial(_other, "check")),
        "engines": (
            "send the same requests to several inference engines and compare them with the trainer",
            partial(_other, "engines"),
        ),
    }
    return run_command("parity", __doc__, commands, argv)


def _other(command: str, argv: Sequence[str]) -> int:
    """Run a command that has a module of its own, which is imported on use."""
    return int(importlib.import_module(f"lockstep_lab.cli.parity_{command}").main(argv))


def parser() -> argparse.ArgumentParser:
    """Every flag of `lockstep parity train`."""
    options = "\n".join(f"  {name:<12} {text}" for name, text in OPTIONS.items())
    parser = arguments.command_parser(
        "lockstep parity train",
        "Train each stack in separate processes, from the same weights and with the same data order and "
        "seed, and\ncompare every step with the reference.\n\nA stack is NAME[:OPTION+OPTION...]. NAME is "
        f"one of {', '.join(backends())}, and an option is one of:\n{options}",
        epilog="For flags that are not given, these environment variables are read: "
        + ", ".join((*ENVIRONMENT, "TP_SIZE", "RING_SIZE"))
        + "; SKIP_DEEPSPEED=1, SKIP_RING=1, ... have the effect of --skip. Exit status 1: a stack failed or "
        "differs, or its loss does not fall.",
    )
    _stack_flags(Flags(parser, "which stacks"))
    _work_flags(Flags(parser, "on what"))
    _output_flags(Flags(parser, "verdict and output"))
    return parser


def _stack_flags(stacks: Flags) -> None:
    stacks.value("--stacks", "LIST", f"comma-separated stacks ({','.join(DEFAULT_STACKS)})")
    stacks.value("--skip", "LIST", f"what to skip: {', '.join(SKIP_WORDS)} or names of stacks")
    stacks.value("--reference", "STACK", "stack to compare with", "local")
    stacks.value(
        "--gpus", ranks, "number of ranks of each stack, on a CPU too (all GPUs, or 2; at least tp * ring)"
    )
    stacks.choice("--device", ["auto", "cpu", "cuda"], default="auto")


def _work_flags(work: Flags) -> None:
    work.choice("--algorithm", ["sft", "grpo", "ppo", "rm", *PREFERENCES], default="sft")
    work.value("--model", "NAME", "(bundled:smollm2-135m)")
    work.value("--num-layers", positive, "use only the first N layers")
    work.choice(
        "--dtype", ["auto", "float32", "bfloat16"], "auto: float32 on a CPU, bfloat16 on a GPU", "auto"
    )
    work.value("--dataset", "SOURCE", "data, as for data.source in lockstep train sft (made-up documents)")
    work.many("--data", "NAME=VALUE", "another setting of [data] (repeatable)")
    work.value("--recording", path, "inputs for --algorithm grpo or ppo (the shipped corpus)", metavar="PATH")
    work.value("--max-samples", positive, "number of documents (160)")
    work.value("--batch-size", positive, "documents per step", 8)
    work.value("--steps", positive, "optimizer steps (sft: one pass; grpo, ppo: 20)")
    work.value("--max-length", positive, "maximum length of a document, in tokens", 1024)
    work.value("--token-budget", positive, "token slots of a micro-batch", 4096)
    work.value("--lr", above_zero, "(1e-3 for shape: models, else 2e-5)")
    work.choice("--optimizer", ["adamw", "sgd"], default="adamw")
    work.value("--seed", seed, default=0)


def _output_flags(output: Flags) -> None:
    output.value("--threshold", above_zero, "largest allowed relative difference of a loss", 0.05)
    output.switch("--allow-flat", "only report losses that do not fall, without failing")
    output.switch("--gradients", "compare gradients of the first and last step")
    output.value("--timeout", seconds, "deadline per stack", 600.0)
    output.value("--log-dir", path, "folder for NAME_test.log (OUT/logs)", metavar="DIR")
    output.results("parity")


def train(argv: Sequence[str]) -> int:
    """`lockstep parity train`."""
    args = parser().parse_args(list(argv))
    command = shlex.join(["lockstep", "parity", "train", *argv])
    options = make_options(args, os.environ, command=command)
    check_writable(args.json)
    from lockstep_lab.train_parity.report import progress_line, report, write_reports
    from lockstep_lab.train_parity.run import run_parity

    tell = arguments.nothing if args.quiet else say
    for note in options.notes:
        tell(note)
    tell(f"parity: {options.out}")
    result = run_parity(options, progress=lambda *event: tell(progress_line(*event)))
    write_reports(result, options.out)
    files = f"{options.out}/parity.html, parity.md, parity.png, parity.json"
    return conclude(result, report(result), args, files)


def make_options(args: argparse.Namespace, environ: Mapping[str, str], *, command: str = "") -> ParityOptions:
    """The options of flags and environment; flags win.

    Raises:
        ConfigError: a value that cannot be right, named with its flag or variable.
    """
    from lockstep_lab.train_parity.run import ParityOptions

    notes = take_environment(args, environ)
    device, gpus = device_of(args.device)
    reference = parse_stack(args.reference)
    skip = parse_skip(args.skip) if isinstance(args.skip, str) else args.skip
    if args.skip and reference.backend in skip and not backends()[reference.backend].spans_ranks:
        raise ConfigError(
            f"contradiction: {reference.backend} is skipped, but it is the reference; choose another with "
            "--reference"
        )
    args.model = args.model or "bundled:smollm2-135m"
    check_model(args.model, setting="--model")
    return arguments.options(
        ParityOptions,
        args,
        stacks=parse_stacks(args.stacks),
        reference=reference,
        out=args.out or arguments.default_out("parity"),
        skip=skip,
        model=model_of(args, device),
        train=_train(args),
        device=device,
        default_ranks=gpus or 2,
        data=_data(args),
        max_samples=args.max_samples or 160,
        must_fall=not args.allow_flat,
        notes=notes,
        command=command,
    )


def take_environment(args: argparse.Namespace, environ: Mapping[str, str]) -> list[str]:
    """Fill in settings that no flag gives from the environment; return a line about them.

    Raises:
        ConfigError: a variable whose value cannot be right.
    """
    settings = []
    kinds: dict[str, Callable[[str], Any]] = {
        "gpus": arguments.positive,
        "max_samples": arguments.positive,
        "out": Path,
        "log_dir": Path,
    }
    for name, (argument, flag) in ENVIRONMENT.items():
        if environ.get(name, "") == "" or getattr(args, argument) is not None:
            continue
        setattr(args, argument, _read(name, environ[name], kinds.get(argument, str), flag))
        settings.append(f"{name}={environ[name]}")
    if args.stacks is None:
        sizes = {"tp": 2, "ring": 2}
        for axis, name in (("tp", "TP_SIZE"), ("ring", "RING_SIZE")):
            if environ.get(name, ""):
                sizes[axis] = _read(name, environ[name], arguments.positive, "--stacks")
                settings.append(f"{name}={environ[name]}")
        args.stacks = _usual_stacks(**sizes)
    if args.skip is None:
        args.skip = []
        for name in sorted(environ):
            if name.startswith(_SKIP) and _is_on(name, environ[name]):
                args.skip += parse_skip(_skip_word(name), source=name)
                settings.append(f"{name}={environ[name]}")
    return [f"from the environment: {', '.join(settings)}"] if settings else []


def _usual_stacks(*, tp: int, ring: int) -> str:
    """The stacks of the usual suite, with these sizes; size 1 leaves the axis out."""
    sized = (
        dataclasses.replace(s, tp=tp if s.tp > 1 else 1, ring=ring if s.ring > 1 else 1)
        for s in map(parse_stack, DEFAULT_STACKS)
    )
    return ",".join(dict.fromkeys(stack.name for stack in sized))


def _read(name: str, text: str, kind: Callable[[str], Any], flag: str) -> Any:
    """The value of an environment variable. Raises ConfigError, which names the flag for it."""
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(
            f"wrong-environment: {name} in the environment: {error}; correct it, or give {flag}"
        ) from error


def _skip_word(name: str) -> str:
    """SKIP_FSDP2_TP -> tp; SKIP_TP_RING, SKIP_FSDP2_TP_RING, SKIP_COMBINED -> tp_ring; SKIP_RING -> ring."""
    word = name.removeprefix(_SKIP).lower() or "?"
    for backend in backends():
        word = word.removeprefix(f"{backend}_")
    return {"combined": "tp_ring", "ring_tp": "tp_ring", "autotp": "tp"}.get(word, word)


def _is_on(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in ("1", "true", "yes", "on"):
        return True
    if word in ("", "0", "false", "no", "off"):
        return False
    raise ConfigError(
        f"wrong-environment: {name}={text!r} in the environment: set 1 to skip, 0 or nothing to run"
    )


def device_of(name: str) -> tuple[str, int]:
    """Return (device, number of GPUs)."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cuda" and not gpus:
        raise ConfigError("missing-device: --device cuda: this machine has no visible GPU; set --device cpu")
    device = name if name != "auto" else "cuda" if gpus else "cpu"
    return device, gpus if device == "cuda" else 0


def model_of(args: argparse.Namespace, device: str) -> ModelConfig:
    """The model of --model, --dtype, --num-layers and --seed. Raises ConfigError."""
    from lockstep.config.load import check
    from lockstep.config.model import ModelConfig

    dtype = {"cpu": "float32", "cuda": "bfloat16"}[device] if args.dtype == "auto" else args.dtype
    settings = {"name": args.model, "dtype": dtype, "num_layers": args.num_layers, "seed": args.seed}
    return check(settings, ModelConfig, origin="--model, --num-layers, --seed")


def _train(args: argparse.Namespace) -> Any:
    from lockstep.config.load import check
    from lockstep.config.train import TrainConfig

    lr = args.lr or (1e-3 if args.model.startswith("shape:") else 2e-5)
    settings = {"lr": lr, "optimizer": args.optimizer, "token_budget": args.token_budget}
    return check(settings, TrainConfig, origin="--lr, --token-budget")


def _data(args: argparse.Namespace) -> Any:
    """The data settings, checked as those of an SFT run; None: made-up documents.

    Raises:
        ConfigError: one of them is wrong, or would not be read.
    """
    from lockstep.config.load import load_run, parse_value

    _check_read(args)
    if args.dataset is None:
        return None
    overrides: dict[str, Any] = {"data.source": args.dataset}
    for word in args.data:
        name, text = arguments.pair("--data", word, example="prompt_column=question")
        overrides[f"data.{name}"] = parse_value(text, origin=f"--data {name}")
    if args.dataset == "ids" or args.dataset.startswith("reasoning_gym:"):
        from lockstep.config.data import DataConfig

        return DataConfig(source=args.dataset)
    return load_run(kind="sft", overrides=overrides).data


def _check_read(args: argparse.Namespace) -> None:
    """Raises ConfigError: a flag about inputs that nothing would read."""
    on_policy = args.algorithm in ("grpo", "ppo")
    if on_policy and args.dataset is not None:
        raise ConfigError(
            f"no-effect: --dataset (DATASET) {args.dataset} has no effect with --algorithm {args.algorithm}, "
            "which reads a recording; give --recording, or leave --dataset out"
        )
    if not on_policy and args.recording is not None:
        raise ConfigError(
            f"no-effect: --recording {args.recording} has no effect with --algorithm {args.algorithm}, which "
            "reads documents; give --dataset, or --algorithm grpo or ppo"
        )
    if not args.data:
        return
    if args.dataset is None:
        raise ConfigError(f"no-effect: --data {args.data[0]} needs --dataset (DATASET), which is not given")
    if args.dataset == "ids" or args.dataset.startswith("reasoning_gym:"):
        raise ConfigError(
            f"no-effect: --data {args.data[0]} has no effect with --dataset {args.dataset}: these documents "
            "are generated from --max-samples, --max-length and --seed alone; leave --data out"
        )
