"""Errors: each has a code of the table, every code of the table is used, and code and fields survive a
pickle."""

from __future__ import annotations

import ast
import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import CODES, ConfigError, DataError
from lockstep.ranks.guard import Desync

SOURCE = Path(__file__).resolve().parents[1] / "src" / "lockstep"
OWN_CONSTRUCTOR = {"Desync", "ArmFailed"}
"""Errors that name their code in their constructor."""


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE), ast.parse(path.read_text(encoding="utf-8"))


def name_of(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def error_classes() -> set[str]:
    """Names of LockstepError and its subclasses."""
    bases = {
        node.name: {name_of(base) for base in node.bases}
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    known: set[str] = set()
    found = {"LockstepError"}
    while found != known:
        known = found
        found = known | {name for name, above in bases.items() if above & known}
    return found


def codes_of(call: ast.Call) -> Iterator[str]:
    """The codes that a call names: several where an expression chooses one, none where it is passed on."""
    for keyword in call.keywords:
        if keyword.arg == "code":
            value = keyword.value
            for node in (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def has_code(call: ast.Call) -> bool:
    """Whether a call names a code, or passes on code and fields of another error by `**error.data`."""
    return any(keyword.arg in ("code", None) for keyword in call.keywords)


def test_every_error_has_a_code_of_the_table() -> None:
    classes = error_classes() - OWN_CONSTRUCTOR
    without, unknown = [], []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            where = f"{path}:{node.lineno}"
            unknown += [f"{where}: {code}" for code in codes_of(node) if code not in CODES]
            if name_of(node.func) in classes and not has_code(node):
                without.append(where)
    assert not without and not unknown


def test_every_code_of_the_table_is_used() -> None:
    used = {
        node.value
        for path, tree in trees()
        if path != Path("errors.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert set(CODES) <= used


def test_codes_and_what_they_mean_are_short() -> None:
    for code, text in CODES.items():
        assert code == code.lower() and set(code) <= set("abcdefghijklmnopqrstuvwxyz-"), code
        assert text.endswith((".", "...")) and len(text) <= 120, text


def test_code_and_fields_survive_a_pickle() -> None:
    error = ConfigError("no", code="no-effect", setting="train.lr", path=Path("a\udcff"), sizes=(1, 2))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == "no" and again.data == error.data
    assert json.loads(json.dumps(again.data)) == {
        "code": "no-effect",
        "setting": "train.lr",
        "path": "a\\udcff",
        "sizes": [1, 2],
    }
    desync = pickle.loads(pickle.dumps(Desync("gone", step=3, positions={0: None})))
    assert desync.data == {"code": "out-of-step", "step": 3} and desync.positions == {0: None}


def test_an_error_is_raised_again_with_the_code_of_its_cause() -> None:
    cause = DataError("row 3: empty", code="empty", name="row 3")
    with pytest.raises(DataError) as caught:
        raise DataError(f"eval_data: {cause}", **cause.data) from cause
    assert caught.value.data == {"code": "empty", "name": "row 3"}
