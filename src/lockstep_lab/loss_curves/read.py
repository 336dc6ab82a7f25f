"""Losses of runs that exist, whoever made them: metrics.jsonl, TensorBoard, trainer_state.json, text logs.

Nothing in a file is executed or unpickled; a file is read as text, JSON or TensorBoard's records, up to a
size. Which key or tag was taken is part of the result.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError
from lockstep.observe.files import read_plain
from lockstep.observe.run_history import EVALUATION
from lockstep.observe.text import counted

MOST_BYTES = 512 * 2**20
"""Larger files are refused."""
_MOST_NAMED = 12

PREFERRED = ("loss", "train/loss", "train_loss", "loss/train", "train/gpt_loss", "gpt_loss", "training_loss")
"""Keys of a training loss, the first that a run has is taken."""
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_VALUE = rf"(?:{_NUMBER}|[-+]?(?:nan|inf(?:inity)?)\b)"
_PAIR = re.compile(
    rf"(?<![\w./])['\"]?([A-Za-z][\w./-]{{0,60}})['\"]?\s{{0,4}}[:=]\s{{0,4}}['\"]?({_VALUE})", re.IGNORECASE
)
_BARE = re.compile(r"(?<![\w./])([\w./-]{0,40}loss)\s{1,4}([-+]?\d*\.\d+(?:[eE][-+]?\d+)?)", re.IGNORECASE)
_STEP = re.compile(
    r"\b(?:global[_ ]?step|steps?|iter(?:ation)?|update)['\"]?\s{0,4}[:=]?\s{0,4}"
    r"\[?\s{0,8}(\d{1,12})\b(?!\.\d)",
    re.IGNORECASE,
)
_BAR = re.compile(r"(?<![\d.])(\d{1,12})/\d{1,12} \[")
"""tqdm: "12/125 [00:03<00:29, ...]"."""
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_LONGEST_LINE = 20_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The losses of one run, or its values of another key."""

    path: Path
    key: str
    """The key or tag that was read."""
    source: str
    """A description of the file, key and kind."""
    steps: tuple[int, ...]
    """Ascending; from 0 where the run has no step numbers."""
    values: tuple[float, ...]
    numbered: bool
    """Whether the run says which step each loss belongs to."""
    notes: tuple[str, ...] = ()


def read_losses(path: Path, *, key: str | None = None) -> Losses:
    """The training losses of a run directory, a metrics.jsonl, TensorBoard events, a trainer_state.json or a
    text log.

    Args:
        key: the key or tag to take; None: the first of PREFERRED, else the only one with "loss" in its name.

    Raises:
        ConfigError: there is no such file, it is too large or damaged, or it has no loss (then its keys are
            named).
    """
    file, kind = _find(Path(path))
    if kind == "tensorboard":
        return _from_tensorboard(file, key)
    advice = "cut it down to the lines with losses"
    text = read_plain(file, ConfigError, limit=MOST_BYTES, advice=advice).decode("utf-8", errors="replace")
    if kind == "trainer_state":
        return _from_trainer_state(file, text, key)
    if kind == "jsonl":
        return _from_jsonl(file, text, key)
    return _from_text(file, text, key)


def _find(path: Path) -> tuple[Path, str]:
    """Find the file with the losses and the function that reads it."""
    if path.is_file():
        if path.name.startswith("events.out.tfevents") or ".tfevents." in path.name:
            return path, "tensorboard"
        if path.suffix == ".jsonl":
            return path, "jsonl"
        return path, "trainer_state" if path.suffix == ".json" else "text"
    if not path.is_dir():
        raise ConfigError(
            f"no-such-file: {path}: there is no such file or folder; give a run, a log or a metrics file"
        )
    for name, kind in (("metrics.jsonl", "jsonl"), ("trainer_state.json", "trainer_state")):
        if (path / name).is_file():
            return path / name, kind
    states = sorted(path.glob("checkpoint-*/trainer_state.json"), key=_checkpoint_number)
    if states:
        return states[-1], "trainer_state"
    events = sorted(path.rglob("*.tfevents.*")) + sorted(path.rglob("events.out.tfevents*"))
    folders = sorted({event.parent for event in events})
    if len(folders) > 1:
        names = ", ".join(str(folder) for folder in folders[:_MOST_NAMED])
        raise ConfigError(
            f"ambiguous: {path} has event files of {len(folders)} runs ({names}); give the folder of one"
        )
    if folders:
        return folders[0], "tensorboard"
    logs = sorted([*path.glob("*.log"), *path.glob("*.txt")])
    if len(logs) == 1:
        return logs[0], "text"
    raise ConfigError(
        f"wrong-kind-of-file: {path} contains no metrics.jsonl, trainer_state.json or TensorBoard events"
        + (f", but {len(logs)} logs; give one of them" if logs else ", nor a log")
    )


def _checkpoint_number(path: Path) -> int:
    number = path.parent.name.partition("-")[2]
    return int(number) if number.isdecimal() else -1


# --- our own, and Hugging Face's ----------------------------------------------------------------------------


def _from_jsonl(path: Path, text: str, key: str | None) -> Losses:
    rows = []
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if number == len(lines):  # of a run that was killed
                break
            raise ConfigError(
                f"not-json: {path}, line {number}: not JSON ({error}); correct it or remove it"
            ) from error
        if not isinstance(value, dict):
            raise ConfigError(
                f"wrong-type: {path}, line {number}: expected an object, got {type(value).__name__}"
            )
        if EVALUATION not in value:
            rows.append(value)
    return _from_rows(path, rows, key, what="metrics")


def _from_trainer_state(path: Path, text: str, key: str | None) -> Losses:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not-json: {path}: not JSON ({error})") from error
    rows = value.get("log_history") if isinstance(value, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(
            f"missing-field: {path}: field 'log_history' is missing or not a list; is it a "
            "trainer_state.json?"
        )
    return _from_rows(path, rows, key, what="trainer_state")


def _from_rows(path: Path, rows: Iterable[Mapping[str, Any]], key: str | None, *, what: str) -> Losses:
    rows = list(rows)
    names = {name for row in rows for name, value in row.items() if _number(value) is not None}
    chosen = _choose(path, names, key)
    entries = [(row.get("step", row.get("global_step")), row[chosen]) for row in rows if chosen in row]
    pairs = [(step, _number(value)) for step, value in entries]
    numbered = all(isinstance(step, int) and not isinstance(step, bool) for step, _ in pairs)
    return _losses(
        path,
        [(step if numbered else None, math.nan if value is None else value) for step, value in pairs],
        key=chosen,
        source=f"{what}, key {chosen!r}",
    )


def _number(value: Any) -> float | None:
    """Read a number; our JSON has NaN and infinities as strings."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)):
        try:
            return float(value)
        except OverflowError:
            return math.inf
    if value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return None


# --- TensorBoard --------------------------------------------------------------------------------------------


def _from_tensorboard(path: Path, key: str | None) -> Losses:
    import logging

    if importlib.util.find_spec("tensorboard") is None:
        raise missing_package(f"{path}: reading event files", "tensorboard", extra="tensorboard")
    accumulators: Any = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    tensor_util: Any = importlib.import_module("tensorboard.util.tensor_util")

    files = [path] if path.is_file() else sorted(path.glob("*tfevents*"))
    if sum(file.stat().st_size for file in files) > MOST_BYTES:
        raise ConfigError(f"too-large: {path}: its event files are larger than {MOST_BYTES / 2**20:,.0f} MiB")
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    events = accumulators.EventAccumulator(str(path), size_guidance={"scalars": 0, "tensors": 0})
    try:
        events.Reload()
        tags = events.Tags()
    except Exception as error:  # whatever its parser raises for a damaged file
        raise ConfigError(
            f"damaged-file: {path}: TensorBoard cannot read it ({type(error).__name__}: {error})"
        ) from error
    chosen = _choose(path, {*tags["scalars"], *tags["tensors"]}, key)
    if chosen in tags["scalars"]:
        pairs: list[tuple[int | None, float]] = [(e.step, float(e.value)) for e in events.Scalars(chosen)]
    else:
        pairs = [
            (e.step, float(tensor_util.make_ndarray(e.tensor_proto).reshape(-1)[0]))
            for e in events.Tensors(chosen)
        ]
    return _losses(path, pairs, key=chosen, source=f"TensorBoard, tag {chosen!r}")


# --- text ---------------------------------------------------------------------------------------------------


def _from_text(path: Path, text: str, key: str | None) -> Losses:
    """`loss: 2.31`, `loss=2.31`, `loss 2.31`, `{'loss': 2.31, ...}`, and the line's step if it has one."""
    entries: dict[str, list[tuple[int | None, float]]] = {}
    for line in re.split(r"[\r\n]+", text):
        line = _ANSI.sub("", line[:_LONGEST_LINE])
        if "loss" not in line.lower():
            continue
        step = _STEP.search(line) or _BAR.search(line)
        number = None if step is None else int(step[1])
        for match in (*_PAIR.finditer(line), *_BARE.finditer(line)):
            name = match[1].lower()
            if "loss" in name or name == key:
                entries.setdefault(name, []).append((number, float(match[2])))
    chosen = _choose(path, set(entries), key if key is None else key.lower())
    pairs = entries[chosen]
    if any(step is None for step, _ in pairs):
        pairs = [(None, value) for _, value in pairs]
    return _losses(path, pairs, key=chosen, source=f"text, {chosen!r}")


# --- all ----------------------------------------------------------------------------------------------------


def _choose(path: Path, names: set[str], key: str | None) -> str:
    """The key of the training loss."""
    listed = ", ".join(sorted(names)[:_MOST_NAMED]) + (", ..." if len(names) > _MOST_NAMED else "")
    if key is not None:
        if key in names:
            return key
        raise ConfigError(
            f"unknown-name: {path} has no {key!r}; it has {listed or 'no numbers'}. Choose one with --key"
        )
    for name in PREFERRED:
        if name in names:
            return name
    losses = sorted(name for name in names if "loss" in name.lower() and "eval" not in name.lower())
    if len(losses) == 1:
        return losses[0]
    if losses:
        raise ConfigError(
            f"ambiguous: {path} has several losses: {', '.join(losses[:_MOST_NAMED])}; choose one with --key"
        )
    hint = f"; it has {listed}. Choose one with --key" if names else ""
    raise ConfigError(f"missing-values: {path}: no loss found{hint}")


def _losses(path: Path, pairs: list[tuple[int | None, float]], *, key: str, source: str) -> Losses:
    """In the order of steps; of a step that is there again (a resumed run, several ranks) the last value."""
    numbered = all(step is not None for step, _ in pairs)
    known: dict[int, float] = {}
    for number, (step, value) in enumerate(pairs):
        known[number if step is None or not numbered else step] = value
    notes: tuple[str, ...] = ()
    if len(known) < len(pairs):
        notes = (f"{counted(len(pairs) - len(known), 'repeated step')}; the last value of each is taken",)
    steps = tuple(sorted(known))
    return Losses(
        path=path,
        key=key,
        source=source,
        steps=steps,
        values=tuple(known[step] for step in steps),
        numbered=numbered,
        notes=notes,
    )
