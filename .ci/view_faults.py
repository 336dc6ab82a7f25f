"""Faults that the checks must find: each is a small change of a copy of the source."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A change of one file, and the check that must fail with it."""

    name: str
    file: str
    """Below lockstep/view."""
    old: str
    new: str
    check: str


FAULTS = (
    Fault(
        name="unescaped row",
        file="render.py",
        old="mark(each) if number % 2 else each for",
        new="mark(each) if number % 2 else Markup(each) for",
        check="hostile",
    ),
    Fault(
        name="control characters",
        file="render.py",
        old="finalize=lambda value: value if isinstance(value, Markup) else printable_text(str(value)),",
        new="finalize=lambda value: value,",
        check="hostile",
    ),
    Fault(
        name="wrong step",
        file="curves.py",
        old="float(column[found[-1]])",
        new="float(column[found[-1] - 1])",
        check="step",
    ),
    Fault(
        name="stale curves",
        file="curves.py",
        old="if before is None or changed or problems != before.problems:",
        new="if before is None:",
        check="running",
    ),
    Fault(
        name="stale index",
        file="index.py",
        old="known.get(file.path.name, ())[1:] == (file.size, file.mtime_ns) for",
        new="file.path.name in known for",
        check="changed",
    ),
    Fault(
        name="lost last line",
        file="curves.py",
        old="    there = np.isfinite(ys) & np.isfinite(xs)\n",
        new="    there = np.isfinite(ys) & np.isfinite(xs)\n    there[-1:] = False\n",
        check="curves",
    ),
    Fault(
        name="lost extremes",
        file="curves.py",
        old="extremes = [starts + filled.argmin(axis=1), starts + filled.argmax(axis=1)]",
        new="extremes = [starts]",
        check="long",
    ),
    Fault(
        name="smoothing over raw",
        file="curves.py",
        old='"y": ys[kept].tolist()',
        new='"y": (ys if means is None else means)[kept].tolist()',
        check="curves",
    ),
    Fault(
        name="wrong group",
        file="rollout_reader.py",
        old="pieces=self._pieces, prompt_index=prompt_index, problems",
        new="pieces=self._pieces, prompt_index=(prompt_index + 1) % 2**30, problems",
        check="rollouts",
    ),
    Fault(
        name="gap and logprob swapped",
        file="render.py",
        old="(one.logprob, one.gap,",
        new="(one.gap, one.logprob,",
        check="rollouts",
    ),
    Fault(
        name="tokens cut off in silence",
        file="templates/parts.html.j2",
        old="{% if left %}",
        new="{% if false %}",
        check="long_rollout",
    ),
    Fault(
        name="damage not named",
        file="templates/parts.html.j2",
        old="{% for each in problems %}",
        new="{% for each in [] %}",
        check="damaged",
    ),
    Fault(
        name="missing policy",
        file="server.py",
        old='    "content-security-policy": POLICY,\n',
        new="",
        check="access",
    ),
    Fault(
        name="another host accepted",
        file="server.py",
        old="if len(hosts) != 1 or hosts[0].lower() not in self._hosts:",
        new="if len(hosts) != 1:",
        check="access",
    ),
    Fault(
        name="any token accepted",
        file="server.py",
        old='if self._right(request.cookies.get(self._cookie, "")):',
        new="if True:",
        check="access",
    ),
    Fault(
        name="newer version shown",
        file="runs.py",
        old="if _version(written) > _version(__version__):",
        new="if False:",
        check="versions",
    ),
    Fault(
        name="request of an exported file",
        file="templates/export.html.j2",
        old="<title>Lockstep</title>",
        new='<title>Lockstep</title><link rel="stylesheet" href="https://example.com/font.css">',
        check="export",
    ),
)


def plant(fault: Fault, source: Path) -> str:
    """Change the file below `source`; return what it was.

    Raises:
        RuntimeError: the text that the fault changes is not there exactly once.
    """
    file = source / "lockstep" / "view" / fault.file
    was = file.read_text()
    if was.count(fault.old) != 1:
        raise RuntimeError(f"fault {fault.name!r}: {fault.file} has its text {was.count(fault.old)} times")
    file.write_text(was.replace(fault.old, fault.new))
    return was
