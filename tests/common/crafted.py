"""Flight records that no run writes."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from lockstep.observe import lock
from lockstep.observe.flight import FlightRecorder
from lockstep.ranks.stacks import Frame


def record(folder: Path, *, rank: int = 0, world_size: int = 2) -> Path:
    """A whole record of this process, with one group and one collective."""
    recorder = FlightRecorder(folder, rank=rank, world_size=world_size)
    recorder.note(step=3, phase="generate", inputs=[5, 6])
    recorder.introduce("0", list(range(world_size)))
    recorder.enter(recorder.label("allreduce", group="0", shapes="[8] float32"))
    recorder.close()
    return recorder.path


def overwrite(path: Path, at: int, form: str, *values: object) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<" + form, *values))


def name_process(path: Path, pid: int) -> None:
    """Have the record name another process, with its start, as one that answers to the signal."""
    overwrite(path, 20, "IQ", pid, lock.start_time(pid))
    overwrite(path, 48, "Q", True)


def set_groups(path: Path, text: bytes, *, length: int | None = None) -> None:
    overwrite(path, 512, "QI", 2, len(text) if length is None else length)
    overwrite(path, 524, f"{len(text)}s", text)


def frame(file: Path) -> Frame:
    return Frame(file=str(file), line=1, name="f")


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_link(path: Path) -> None:
    away = path.parent.parent / "away"
    path.rename(away)
    path.symlink_to(away)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


SLOT, BEAT = 8192, 128
DAMAGES = {
    "fifo": (as_fifo, "not-a-file"),
    "folder": (as_folder, "not-a-file"),
    "link out of the folder": (as_link, "leads-out-of-folder"),
    "empty": (lambda path: os.truncate(path, 0), "damaged-file"),
    "cut off": (lambda path: os.truncate(path, 9000), "damaged-file"),
    "too long": (lambda path: os.truncate(path, 1 << 40), "damaged-file"),
    "another version": (lambda path: overwrite(path, 8, "I", 99), "version-differs"),
    "another rank": (lambda path: overwrite(path, 12, "I", 7), "damaged-file"),
    "a world of none": (lambda path: overwrite(path, 16, "I", 0), "damaged-file"),
    "pid 0": (lambda path: overwrite(path, 20, "I", 0), "damaged-file"),
    "pid 2^32 - 1": (lambda path: overwrite(path, 20, "I", 2**32 - 1), "damaged-file"),
    "start NaN": (lambda path: overwrite(path, 32, "d", float("nan")), "damaged-file"),
    "heartbeat NaN": (lambda path: overwrite(path, BEAT + 16, "d", float("nan")), "damaged-file"),
    "heartbeat 1e300": (lambda path: overwrite(path, BEAT + 32, "d", 1e300), "damaged-file"),
    "many inputs": (lambda path: overwrite(path, BEAT + 104, "I", 2**31), "damaged-file"),
    "groups: no JSON": (lambda path: set_groups(path, b"\xff{"), "not-json"),
    "groups: a list": (lambda path: set_groups(path, b"[1]"), "damaged-file"),
    "groups: a text": (lambda path: set_groups(path, b'{"0": "01"}'), "damaged-file"),
    "groups: huge ranks": (lambda path: set_groups(path, b'{"0": [1e99]}'), "damaged-file"),
    "groups: deep": (lambda path: set_groups(path, b"[" * 7000), "not-json"),
    "groups: beyond the file": (lambda path: set_groups(path, b"{}", length=2**31), "damaged-file"),
    "collective at infinity": (lambda path: overwrite(path, SLOT + 16, "d", float("inf")), "damaged-file"),
}
"""Name -> what is done to a record, and the code of the error that names it."""

HARMLESS = {
    "number in the group 2^63": lambda path: overwrite(path, SLOT + 8, "Q", 2**63),
    "texts that are no UTF-8": lambda path: overwrite(path, SLOT + 32, "24s", b"\xff" * 24),
    "groups of one rank without a record": lambda path: set_groups(path, json.dumps({"0": [9]}).encode()),
    "step 2^62": lambda path: overwrite(path, BEAT + 24, "q", 2**62),
    "stacks: a fifo": lambda path: (
        os.mkfifo(path.with_suffix(".stacks.new"))
        or path.with_suffix(".stacks.new").replace(path.with_suffix(".stacks"))
    ),
    "stacks: of no thread": lambda path: path.with_suffix(".stacks").write_text("Thread 0x" + "f" * 9000),
    "stacks: long numbers": lambda path: path.with_suffix(".stacks").write_text(
        f'Thread 0x1 (most recent call first):\n  File "x.py", line {"9" * 5000} in f\n'
    ),
}
"""Damages that leave something to report."""
