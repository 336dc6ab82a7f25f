"""Python stacks that processes have written, and the processes below one."""

from __future__ import annotations

import contextlib
import linecache
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import psutil

from lockstep.processes.programs import role_of
from lockstep.processes.supervisor import TITLE

_SOURCE_BYTES = 2**22


_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d{1,9}) in (?P<name>.*)')


_THREAD = re.compile(r"(?:Current thread|Thread) 0x(?P<ident>[0-9a-f]{1,32}) ")


_IMPORTED = re.compile(r"\bfrom ([\w.]{1,99}) import\b|\bimport ([\w.]{1,99})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """One Python frame."""

    file: str
    line: int
    name: str

    @property
    def source(self) -> str:
        """The line's text, if the file is on this machine."""
        return linecache.getline(self.file, self.line).strip() if _is_source(self.file) else ""

    @property
    def text(self) -> str:
        """Such as "loop/run.py:481 _memory: everyone = self.ranks.gather(...)"."""
        short = re.sub(r".*/(?:site-packages|lib/python3\.\d+|src/lockstep)/", "", self.file)
        return f"{short}:{self.line} {self.name}" + (f": {self.source}" if self.source else "")


def _is_source(name: str) -> bool:
    """Whether a file can be read for its lines: a file of stacks that others wrote may name any file."""
    with contextlib.suppress(OSError, ValueError):
        found = os.stat(name)
        return name.endswith(".py") and stat.S_ISREG(found.st_mode) and found.st_size <= _SOURCE_BYTES
    return False


def parse_stacks(text: str, main_thread: int) -> tuple[tuple[Frame, ...], ...]:
    """Return the stacks of the last dump of faulthandler in a file, the main thread's first."""
    threads: list[tuple[int, list[Frame]]] = []
    for line in text.splitlines():
        if head := _THREAD.match(line):
            ident = int(head["ident"], 16)
            if any(ident == known for known, _ in threads):
                threads = []  # the next dump begins
            threads.append((ident, []))
        elif threads and (match := _FRAME.match(line)):
            threads[-1][1].append(Frame(file=match["file"], line=int(match["line"]), name=match["name"]))
    threads.sort(key=lambda thread: thread[0] != main_thread)
    return tuple(tuple(frames) for _, frames in threads)


def children_of(pid: int) -> tuple[str, ...]:
    """A line for each process below one: pid, name, state."""
    lines = []
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                role = role_of(child)
                if role != "guard":
                    name = f"{TITLE}{role}" if role else _command(child)
                    lines.append(
                        f"process {child.pid} ({name[:60]}): {child.status()}{_kernel_wait(child.pid)}"
                    )
    return tuple(lines)


def _command(process: psutil.Process) -> str:
    """Return its command line without options; for `python -c` the module that the program imports."""
    try:
        line = process.cmdline()
    except psutil.ZombieProcess:
        return str(process.name())
    if "-c" in line[1:-1]:
        loads = _IMPORTED.search(line[line.index("-c") + 1])
        return f"{Path(line[0]).name} -c" + (f": {loads[1] or loads[2]}" if loads else "")
    words = [word for word in line if not word.startswith("-")]
    return " ".join(Path(word).name for word in words[:3]) or process.name()


def _kernel_wait(pid: int) -> str:
    with contextlib.suppress(OSError):
        where = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace")
        return f" in {where}" if where not in ("", "0") else ""
    return ""
