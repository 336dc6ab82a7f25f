"""Write the parts of the docs that the code already knows; `--check` only says whether they are up to date.

docs/reference/config.md       from the config models
docs/reference/support.md      from lockstep.config.support
docs/reference/algorithms.md   its options table, from lockstep.config.algorithm.PUBLISHED
README.md                      its table of statuses, from lockstep.config.support
"""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lockstep.config.algorithm import PUBLISHED, GRPOConfig
from lockstep.config.load import recipes
from lockstep.config.run import GRPORun, SFTRun
from lockstep.config.support import AXES, SETTINGS, support_rows
from lockstep.config.toml import toml_value

ROOT = Path(__file__).resolve().parents[1]
NOTE = "<!-- Written by scripts/gen_docs.py; edit the source, then run it. -->"


def main(argv: list[str]) -> int:
    """0 when every page is (now) up to date."""
    stale = []
    for path, text in pages().items():
        file = ROOT / path
        if not file.is_file() or file.read_text(encoding="utf-8") != text:
            stale.append(path)
            if "--check" not in argv:
                file.write_text(text, encoding="utf-8")
    told = "out of date" if "--check" in argv else "written"
    print("\n".join(f"{told}: {path}" for path in stale) or "docs are up to date")
    return int(bool(stale) and "--check" in argv)


def pages() -> dict[str, str]:
    """Path -> the text that it should have."""
    found = {"docs/reference/config.md": config_page(), "docs/reference/support.md": support_page()}
    for path, name, text in (
        ("docs/reference/algorithms.md", "published", published_table()),
        ("README.md", "support", status_table()),
    ):
        found[path] = replaced((ROOT / path).read_text(encoding="utf-8"), name, text)
    return found


def replaced(page: str, name: str, text: str) -> str:
    """`page` with what stands between the marks NAME:begin and NAME:end exchanged."""
    marks = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if any(page.count(mark) != 1 for mark in marks):
        raise ValueError(f"the page needs each of {marks} once")
    head, rest = page.split(marks[0])
    return f"{head}{marks[0]}\n\n{text.strip()}\n\n{marks[1]}{rest.split(marks[1])[1]}"


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def config_page() -> str:
    """Every setting of both kinds of run."""
    parts = [
        "# Settings",
        NOTE,
        "Every setting of a run. In a TOML file a dotted name is a key in a section; on the command line it "
        "is a flag: `train.lr` is `lr` under `[train]`, and `--train.lr 1e-5`. Underscores may be hyphens in "
        "flags, and `--train.no-activation-checkpointing` turns a switch off. `kind` at the top of a file is "
        "`grpo` or `sft`.",
        f"Recipes that come with Lockstep: {', '.join(f'`{name}`' for name in recipes())}. "
        "`lockstep train --recipe NAME --print-config` prints one in full.",
    ]
    shared = set(GRPORun.model_fields) & set(SFTRun.model_fields) - {"algorithm", "kind", "eval_data"}
    parts.append("## Both kinds of run")
    parts += sections(GRPORun, only=shared)
    parts.append('## `kind = "grpo"`')
    parts += sections(GRPORun, only=set(GRPORun.model_fields) - shared)
    parts.append('## `kind = "sft"`')
    parts += sections(SFTRun, only=set(SFTRun.model_fields) - shared)
    return "\n\n".join(parts) + "\n"


def sections(model: type[BaseModel], *, only: set[str], prefix: str = "") -> Iterator[str]:
    """A table of the plain fields, then one section per nested config."""
    plain, nested = [], []
    for name, field in model.model_fields.items():
        if name not in only or f"{prefix}{name}" == "kind":
            continue
        inner = nested_model(field.annotation)
        (nested if inner else plain).append((name, field, inner))
    if plain:
        rows = (
            (f"`{prefix}{n}`", type_text(f.annotation, f.metadata), default(f), words(f.description))
            for n, f, _ in plain
        )
        yield table(("setting", "type", "default", "meaning"), rows)
    for name, field, inner in nested:
        many = get_origin(field.annotation) is tuple
        yield f"### `{prefix}{name}`" + (" (a list of tables)" if many else "")
        about = [words(inner.__doc__), words(field.description)]
        if field.default is None:
            about.append("Off unless one of its settings is given.")
        if name == "eval_data":
            yield " ".join(filter(None, [about[1], "Settings as under `data`."]))
            continue
        yield " ".join(filter(None, about))
        yield from sections(
            inner,
            only=set(inner.model_fields),
            prefix=f"{'' if many else prefix}{name}{'[].' if many else '.'}",
        )


def nested_model(annotation: Any) -> type[BaseModel] | None:
    """The config inside an annotation, if there is one."""
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def type_text(annotation: Any, metadata: list[Any] | tuple[Any, ...] = ()) -> str:
    """An annotation in words: `int > 0`, `"a"` or `"b"`."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return type_text(annotation.__origin__, annotation.__metadata__)
    if origin is Literal:
        return ", ".join(f"`{toml_value(value)}`" for value in get_args(annotation))
    if origin in (Union, types.UnionType):
        parts = [type_text(part) for part in get_args(annotation) if part is not type(None)]
        return ", ".join(parts)
    if origin is tuple:
        inner = [part for part in get_args(annotation) if part is not ...]
        return (
            f"list of {len(inner)} {type_text(inner[0])}"
            if len(inner) > 1
            else f"list of {type_text(inner[0])}"
        )
    if origin is dict:
        return "table"
    names = {int: "integer", float: "number", str: "string", bool: "`true`, `false`", Path: "path"}
    bounds = [
        f"{sign} {value:g}"
        for item in metadata
        for key, sign in (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))
        if (value := getattr(item, key, None)) is not None
    ]
    return " ".join([names.get(annotation, str(annotation)), ", ".join(bounds)]).strip()


def default(field: Any) -> str:
    """The default as TOML has it; — for none."""
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "—"
    return f"`{toml_value(list(value) if isinstance(value, tuple) else value)}`".replace("|", "\\|")


def words(text: str | None) -> str:
    """One line, without what would break a table."""
    return re.sub(r"\s+", " ", text or "").strip().replace("|", "\\|")


def support_page() -> str:
    """The whole table, in its order."""
    return (
        "\n\n".join(
            [
                "# What may be combined",
                NOTE,
                "The first row that matches a combination decides; one that no row matches is refused. "
                "*supported* means that a parity test covers it, *untested* that it may be used, "
                "*unsupported* that a run with it is refused, with the reason. `lockstep support` prints the "
                "same table, and answers for one combination.",
                table(
                    ("axis", "setting", "values"),
                    ((axis, f"`{SETTINGS[axis]}`", ", ".join(f"`{v}`" for v in AXES[axis])) for axis in AXES),
                ),
                table(
                    ("status", "combination", "note", "tested by"),
                    (support_line(row) for row in support_rows()),
                ),
            ]
        )
        + "\n"
    )


def support_line(row: dict[str, str]) -> tuple[str, ...]:
    """One row of the table, with only the axes that it restricts."""
    axes = "; ".join(f"{axis} {row[axis]}" for axis in AXES if row[axis] != "any")
    tested = f"`{row['tested']}`" if row["tested"] else ""
    return row["status"], axes or "everything else", row["note"], tested


def status_table() -> str:
    """Per axis, the values that some supported or untested row allows, and those that every row refuses."""
    rows = list(support_rows())

    def status(axis: str, value: str) -> str:
        alone = [r for r in rows if r["status"] == "unsupported" and r[axis] == value]
        if any(all(r[a] == "any" for a in AXES if a != axis) for r in alone):
            return "refused"
        named = [r for r in rows if r["status"] == "supported" and value in r[axis].split(", ")]
        return "supported" if named else "untested"

    lines = []
    for axis in ("backend", "engine", "attention", "execution", "layout", "device", "dtype"):
        by = {
            name: [f"`{v}`" for v in AXES[axis] if status(axis, v) == name]
            for name in ("supported", "untested", "refused")
        }
        lines.append((axis, *(", ".join(by[name]) for name in by)))
    return table(("axis", "supported (parity-tested)", "usable, untested", "refused"), iter(lines))


def published_table() -> str:
    """Options by published name."""
    options = [
        name for name in GRPOConfig.model_fields if any(name in values for values in PUBLISHED.values())
    ]
    rows = (
        (f"`{name}`", *(f"`{toml_value(values[option])}`" if option in values else "—" for option in options))
        for name, values in PUBLISHED.items()
    )
    return table(("`algorithm.name`", *(f"`{option}`" for option in options)), rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
