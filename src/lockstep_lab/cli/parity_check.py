"""`lockstep parity check`: check imports, interfaces, divisible sizes, and which stacks could run here."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, path, ranks
from lockstep.config.load import check
from lockstep.config.model import ModelConfig
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo
from lockstep_lab.cli.suites import console
from lockstep_lab.train_parity.stacks import CHECKED_STACKS, DEFAULT_STACKS, parse_stacks

if TYPE_CHECKING:
    from lockstep_lab.train_parity.check import Finding

USUAL = ("local", *DEFAULT_STACKS, *CHECKED_STACKS)


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = arguments.command_parser(
        "lockstep parity check",
        "Validate the installation without a GPU: imports, the interface of each train backend, the sizes "
        "into which a model can be split, and the stacks that this machine could run. Exit status 1: an "
        "import or an interface is broken, or a stack of --stacks cannot run.",
    )
    flags = Flags(parser)
    flags.value("--model", "NAME", default="bundled:smollm2-135m")
    flags.value("--stacks", "LIST", f"comma-separated stacks ({','.join(USUAL)})")
    flags.value("--gpus", ranks, "number of ranks of each stack")
    flags.value("--json", path, "write the findings to this file")
    flags.switch("--quiet", "print only the verdict")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the checks; 0: no problem. Raises ConfigError for an unknown stack."""
    args = parser().parse_args(list(argv))
    check_writable(args.json)
    stacks = parse_stacks(args.stacks or ",".join(USUAL))
    model = check({"name": args.model}, ModelConfig, origin="--model")
    import torch

    from lockstep_lab.train_parity.check import check_all

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    findings = check_all(stacks, model=model, gpus=args.gpus, device_count=count)
    if not args.quiet:
        _show(findings)
    wrong = [f for f in findings if f.status == "problem" or (args.stacks and f.status == "refused")]
    runnable = [f for f in findings if f.kind == "stack" and f.status == "ok"]
    verdict = f"parity check: {len(runnable)} of {len(stacks)} stacks could run here"
    if wrong:
        verdict += "; " + "; ".join(_brief(f) for f in wrong)
    if args.json is not None:
        values = [dataclasses.asdict(f) for f in findings]
        write_json(args.json, {"ok": not wrong, "verdict": verdict, "findings": values})
    echo(verdict)
    return int(bool(wrong))


def _brief(finding: Finding) -> str:
    return (
        f"{finding.name} cannot run"
        if finding.kind == "stack"
        else f"{finding.kind} {finding.name} is broken"
    )


def _show(findings: Sequence[Finding]) -> None:
    from lockstep_lab.suite.report import Column, Tone, figures, print_table

    tones: dict[str, Tone] = {"ok": "good", "missing": "warn", "refused": "warn", "problem": "bad"}
    heads = {"what": "kind", "name": "name", "status": "status", "detail": "detail"}
    columns = [Column(head, "", field, kind="") for head, field in heads.items()]
    print_table(figures(columns, (([], (f,), tones[f.status]) for f in findings), before=[]), console())
