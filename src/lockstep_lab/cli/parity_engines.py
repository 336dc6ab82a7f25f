"""`lockstep parity engines`: send the same requests to several engines and compare with the trainer."""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, above_zero, positive, seconds, seed
from lockstep.errors import ConfigError, unknown_name
from lockstep.loop.preflight import check_model
from lockstep.observe.files import check_writable
from lockstep_lab.cli.parity import device_of, model_of
from lockstep_lab.cli.suites import conclude, say

if TYPE_CHECKING:
    from lockstep.config.engine import EngineConfig
    from lockstep_lab.engine_parity.run import EngineChoice, EnginesOptions

DEFAULT_ENGINES = "hf,vllm"


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = arguments.command_parser(
        "lockstep parity engines",
        "Send the same requests to several inference engines, each in its own process beside a trainer, and "
        "compare\nthe greedy tokens with the first engine's, the logprobs with the trainer's, and the ids, "
        "stops, seeds and n.\nEverything is then repeated after a weight update.\n\nAn engine is hf, vllm, "
        "sglang or module:Class. NAME=ENGINE gives it a name, so that an engine can be listed twice.",
        epilog="Exit status 1: an engine failed or differs.",
    )
    _engine_flags(Flags(parser, "which engines"))
    _work_flags(Flags(parser, "on what"))
    _output_flags(Flags(parser, "verdict and output"))
    return parser


def _engine_flags(engines: Flags) -> None:
    engines.value("--engines", "LIST", "comma-separated engines; the first is the reference", DEFAULT_ENGINES)
    engines.many(
        "--python", "NAME=VALUE", "engine.python: the interpreter that starts its server (repeatable)"
    )
    engines.many("--url", "NAME=VALUE", "engine.url: a server that is already running (repeatable)")
    engines.many(
        "--option",
        "NAME.KEY=VALUE",
        "a setting of [engine], such as vllm.batch_invariant=true; a name that [engine] does not have is put "
        "into engine.options (repeatable)",
    )


def _work_flags(work: Flags) -> None:
    work.value("--model", "NAME", default="bundled:smollm2-135m")
    work.value("--num-layers", positive, "use only the first N layers")
    work.choice(
        "--dtype",
        ["auto", "float32", "bfloat16", "float16"],
        "auto: float32 on a CPU, bfloat16 on a GPU",
        "auto",
    )
    work.choice("--device", ["auto", "cpu", "cuda"], default="auto")
    work.value("--attention", "KERNEL", "attention kernel of the trainer", "auto")
    work.value(
        "--data",
        "NAME",
        "a recipe or .toml file whose [data] is used, or a source as for data.source "
        "(reasoning_gym:chain_sum, or ids for shape: models)",
    )
    work.value("--max-prompts", positive, "number of prompts, half of them longer than a cache block", 8)
    work.value("--max-tokens", positive, "maximum length of a completion, in tokens", 32)
    work.value("--samples", positive, "samples per prompt", 4)
    work.value("--temperature", above_zero, "sampling temperature", 0.7, metavar="T")
    work.switch("--ignore-eos", "ignore the end-of-sequence token")
    work.choice(
        "--weights",
        ["pushed", "folder"],
        "where the engine's first weights come from: pushed by the trainer, or read from the model's folder "
        "(pushed; folder with --no-update)",
    )
    work.on_off("--update", "change the weights, push them, and send all requests again (on)", default=True)
    work.value(
        "--update-scale",
        above_zero,
        "size of the change, relative to a matrix's root mean square (0.1 in float32, else 0.3)",
    )
    work.value("--seed", seed, default=0)


def _output_flags(output: Flags) -> None:
    output.value(
        "--threshold",
        above_zero,
        "largest allowed mean logprob gap; a single token and the margin of a tie may have ten times as much "
        "(float32 1e-4, float16 0.02, bfloat16 0.05, divided by a temperature below 1)",
        metavar="NATS",
    )
    output.value("--timeout", seconds, "deadline per engine", 900.0)
    output.results("engines")


def main(argv: Sequence[str]) -> int:
    """0: all engines agree; 1: one does not, or failed; 130 after Ctrl-C.

    Raises:
        ConfigError: a wrong setting, before anything is started.
    """
    args = parser().parse_args(list(argv))
    check_model(args.model, setting="--model")
    check_writable(args.json)
    options = make_options(args, command=shlex.join(["lockstep", "parity", "engines", *argv]))
    from lockstep_lab.engine_parity.report import progress_line, report
    from lockstep_lab.engine_parity.run import run_engines
    from lockstep_lab.suite.report import write_report

    tell = arguments.nothing if args.quiet else say
    tell(f"parity engines: {options.out}")
    result = run_engines(options, progress=lambda *event: tell(progress_line(*event)))
    described = report(result)
    write_report(described, result.as_dict(), options.out, "engines")
    return conclude(result, described, args, f"{options.out}/engines.html, engines.md, engines.json")


def make_options(args: argparse.Namespace, *, command: str = "") -> EnginesOptions:
    """The options of the flags, prompts included.

    Raises:
        ConfigError, DataError, ModelError: a value that cannot be right.
    """
    from lockstep.config.load import check
    from lockstep.config.rollout import SamplingConfig
    from lockstep.config.support import AXES, is_kernel
    from lockstep.config.train import TrainConfig
    from lockstep_lab.engine_parity.criteria import default_threshold
    from lockstep_lab.engine_parity.prompts import make_prompts, read_data
    from lockstep_lab.engine_parity.run import EnginesOptions

    engines = parse_engines(args.engines, python=args.python, url=args.url, option=args.option)
    if args.max_prompts < 2:
        raise ConfigError(
            "out-of-range: --max-prompts 1: a short and a long prompt are needed; set 2 or more"
        )
    device = device_of(args.device)[0]
    model = model_of(args, device)
    train = check({"attention": args.attention}, TrainConfig, origin="--attention")
    if train.attention != "auto" and not is_kernel(train.attention):
        kernels = AXES["attention"]
        raise ConfigError(
            f"unknown-name: --attention: {unknown_name('attention kernel', train.attention, kernels)}"
        )
    check({"temperature": args.temperature}, SamplingConfig, origin="--temperature")
    prompts = make_prompts(
        model,
        read_data(args.data, model=args.model),
        max_prompts=args.max_prompts,
        max_tokens=args.max_tokens,
        seed=args.seed,
    )
    return arguments.options(
        EnginesOptions,
        args,
        engines=engines,
        prompts=prompts,
        model=model,
        out=args.out or arguments.default_out("engines"),
        device=device,
        attention=train.attention,
        num_samples=args.samples,
        weights=args.weights or ("pushed" if args.update else "folder"),
        update_scale=args.update_scale or (0.1 if model.dtype == "float32" else 0.3),
        threshold=args.threshold or default_threshold(model.dtype, args.temperature),
        command=command,
    )


def parse_engines(
    text: str, *, python: Sequence[str] = (), url: Sequence[str] = (), option: Sequence[str] = ()
) -> list[EngineChoice]:
    """Parse the engines of `--engines`, with the settings of the other flags.

    Raises:
        ConfigError: an engine or a setting that cannot be, named with its flag.
    """
    from lockstep.engine import ENGINES
    from lockstep_lab.engine_parity.run import EngineChoice

    settings: dict[str, dict[str, Any]] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, engine = word.partition("=")
        engine = engine if equals else word
        name = name if equals else word.rpartition(":")[2]
        if not name or not engine or (engine not in ENGINES and ":" not in engine):
            raise ConfigError(
                f"unknown-name: --engines: {unknown_name('inference engine', engine or word, ENGINES)}"
            )
        if name in settings:
            raise ConfigError(
                f"duplicate: --engines names {name} twice; give each a name, such as {name}-2={engine}"
            )
        settings[name] = {"name": engine}
    if not settings:
        raise ConfigError("missing-setting: --engines is empty; give at least one, such as hf,vllm")
    for flag, words in (("python", python), ("url", url)):
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not value:
                raise ConfigError(
                    f"wrong-format: --{flag} {word!r}: write NAME=VALUE, such as {_example(flag)}"
                )
            # not resolved: an environment's interpreter is a link, and what it links to is another one
            settings[_known(name, settings, flag)][flag] = value if flag == "url" else os.path.abspath(value)
    for word in option:
        _take_option(word, settings)
    return [EngineChoice(name=name, config=_checked(name, values)) for name, values in settings.items()]


def _example(flag: str) -> str:
    return "vllm=.venv-vllm/bin/python" if flag == "python" else "sglang=http://127.0.0.1:30000"


def _known(name: str, settings: dict[str, dict[str, Any]], flag: str) -> str:
    if name not in settings:
        raise ConfigError(f"unknown-name: --{flag}: {unknown_name('engine of --engines', name, settings)}")
    return name


def _take_option(word: str, settings: dict[str, dict[str, Any]]) -> None:
    from lockstep.config.engine import EngineConfig
    from lockstep.config.load import parse_value

    where, equals, text = word.partition("=")
    name, dot, key = where.rpartition(".")
    if not equals or not dot or not key:
        raise ConfigError(
            f"wrong-format: --option {word!r}: write NAME.KEY=VALUE, such as vllm.batch_invariant=true"
        )
    own = settings[_known(name, settings, "option")]
    if key in ("name", "options"):
        raise ConfigError(
            f"unsupported-combination: --option {word!r}: {key} cannot be set here; name a single setting"
        )
    values = own if key in EngineConfig.model_fields else own.setdefault("options", {})
    values[key] = parse_value(text, origin=f"--option {where}")


def _checked(name: str, values: dict[str, Any]) -> EngineConfig:
    from lockstep.config.engine import EngineConfig
    from lockstep.config.load import check

    return check(values, EngineConfig, origin=f"engine {name}")
