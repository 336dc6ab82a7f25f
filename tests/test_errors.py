"""Errors: each has a code of the table, every code of the table is used, and code and fields survive a
pickle, a rank and another text."""

from __future__ import annotations

import ast
import copy
import json
import pickle
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from lockstep.common_errors import missing_package
from lockstep.engine.remote.http import Unreachable
from lockstep.errors import (
    CODES,
    ConfigError,
    DataError,
    EngineError,
    LockstepError,
    RewardError,
    from_another_process,
    together,
    underway,
)
from lockstep.ranks.context import PeerFailed, _Failure
from lockstep.ranks.guard import Desync

SOURCE = Path(__file__).resolve().parents[1] / "src"
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


def code_in_message(call: ast.Call) -> Iterator[str]:
    """The first word of the message, unless the call passes a code, or on what another error has."""
    if not any(keyword.arg in ("code", None) for keyword in call.keywords):
        yield first_words(call.args[0]).partition(": ")[0] if call.args else ""


def first_words(message: ast.expr) -> str:
    """What a message begins with in the source: none of it comes from outside."""
    if isinstance(message, ast.BinOp):
        return first_words(message.left)
    if isinstance(message, ast.JoinedStr):
        return first_words(message.values[0])
    return message.value if isinstance(message, ast.Constant) and isinstance(message.value, str) else ""


def lost_texts(tree: ast.Module) -> Iterator[int]:
    """Yield the lines of strings in functions that are statements of their own, other than docstrings. A
    message that was split without parentheses loses its second half that way, and no linter reports it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for block in ast.walk(function):
            body = getattr(block, "body", [])
            for before, node in pairwise(body if isinstance(body, list) else []):
                if isinstance(node, ast.Expr) and is_text(node.value) and not is_attribute(before):
                    yield node.lineno


def is_text(node: ast.expr) -> bool:
    constant = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return constant or isinstance(node, ast.JoinedStr)


def is_attribute(node: ast.stmt) -> bool:
    """Return whether a docstring may follow: after `self.name = value` and annotated class variables."""
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return isinstance(node, ast.AnnAssign) or any(isinstance(target, ast.Attribute) for target in targets)


def test_no_message_loses_its_second_half() -> None:
    example = "def f(x):\n    'Docstring.'\n    what = f'{x} of '\n    f'{x + 1}'\n    return what"
    assert list(lost_texts(ast.parse(example))) == [4]
    assert {str(path): lines for path, tree in trees() if (lines := list(lost_texts(tree)))} == {}


def test_every_error_has_a_code_of_the_table() -> None:
    classes = error_classes() - OWN_CONSTRUCTOR
    unknown = []
    for path, tree in trees():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            codes = [*codes_of(node), *(code_in_message(node) if name_of(node.func) in classes else ())]
            unknown += [f"{path}:{node.lineno}: {code}" for code in codes if code not in CODES]
    assert not unknown


def test_every_code_of_the_table_is_used() -> None:
    used = {
        node.value.partition(": ")[0]
        for path, tree in trees()
        if path != Path("lockstep/errors.py")
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


@pytest.mark.parametrize(
    ("message", "given", "text", "data"),
    [
        ("no-effect: n = 1 does nothing", {}, "n = 1 does nothing", {"code": "no-effect"}),
        (
            "out-of-range: train.lr = 0 is not above 0",
            {"name": "lr"},
            "train.lr = 0 is not above 0",
            {"code": "out-of-range", "setting": "train.lr", "name": "lr"},
        ),
        (
            "no-effect: rewards[0].kwargs = {}",
            {},
            "rewards[0].kwargs = {}",
            {"code": "no-effect", "setting": "rewards[0].kwargs"},
        ),
        ("empty: --data a.jsonl", {}, "--data a.jsonl", {"code": "empty", "setting": "--data"}),
        ("empty: --eval-data: no", {}, "--eval-data: no", {"code": "empty", "setting": "--eval-data"}),
        ("empty: --data.task x", {}, "--data.task x", {"code": "empty", "setting": "--data.task"}),
        # a setting that is given is the one, and a file is none
        ("empty: --data a", {"setting": "data"}, "--data a", {"code": "empty", "setting": "data"}),
        ("empty: rows.jsonl is empty", {}, "rows.jsonl is empty", {"code": "empty"}),
        ("empty: rows.jsonl: no", {}, "rows.jsonl: no", {"code": "empty"}),
        # only the first code is one, and text from outside is left as it is
        ("empty: no-effect: x", {}, "no-effect: x", {"code": "empty"}),
        ("x: y", {"code": "empty"}, "x: y", {"code": "empty"}),
        ("no-effect: train.lr = 1", {"code": "empty"}, "no-effect: train.lr = 1", {"code": "empty"}),
        ("empty: ", {}, "", {"code": "empty"}),
    ],
)
def test_the_first_word_is_the_code_unless_one_is_given(message, given, text, data) -> None:
    error = DataError(message, **given)
    assert (str(error), error.data) == (text, data)


@pytest.mark.parametrize("message", ["", "x: y", "empty", "empty:x", " empty: x", "Empty: x"])
def test_an_error_without_a_code_is_a_mistake(message) -> None:
    with pytest.raises(TypeError):
        DataError(message)


def failed() -> EngineError:
    """An error of work that had begun, with a field that its message does not show."""
    with pytest.raises(Unreachable) as caught, underway(lambda: True):
        raise Unreachable("unreachable: empty: no answer", tries=3)
    return caught.value


@pytest.mark.parametrize("same", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_a_copy_has_everything(same: Callable[[EngineError], EngineError]) -> None:
    again = same(failed())
    assert type(again) is Unreachable and str(again) == "empty: no answer" and again.underway
    assert again.data == {"code": "unreachable", "tries": 3}


def test_another_text_keeps_code_and_fields() -> None:
    cause = DataError("empty: no text", name="row 3")
    inner = cause.with_message(f"wrong-row: {cause}", line=4)  # a file of that name, not a code
    outer = inner.with_message(f"data: {inner}; mend it", kind=RewardError, name="math")
    assert str(outer) == "data: wrong-row: no text; mend it" and type(outer) is RewardError
    assert outer.data == {"code": "empty", "name": "math", "line": 4}
    assert (type(inner), inner.data) == (DataError, {"code": "empty", "name": "row 3", "line": 4})
    assert cause.data == {"code": "empty", "name": "row 3"} and str(cause) == "no text"


def test_another_text_keeps_what_a_class_has_of_its_own() -> None:
    desync = Desync("gone", step=3, positions={0: None})
    desync.add_note("of the cause alone")
    again = desync.with_message(f"rank 0: {desync}")
    assert type(again) is Desync and again.positions == {0: None} and str(again) == "rank 0: gone"
    assert not hasattr(again, "__notes__")
    assert failed().with_message("x").underway and failed().with_message("x", kind=EngineError).underway


def test_problems_together_have_the_class_and_code_of_the_first() -> None:
    both = together([Desync("gone", step=3, positions={}), DataError("empty: row 3", name="row 3")])
    assert type(both) is Desync and both.data == {
        "code": "out-of-step",
        "step": 3,
        "problems": [{"code": "out-of-step", "step": 3}, {"code": "empty", "name": "row 3"}],
    }


def on_another_rank(error: Exception) -> LockstepError:
    return pickle.loads(pickle.dumps(_Failure.of(error))).as_error(1, "saving")


def test_another_rank_raises_the_same_error() -> None:
    error = on_another_rank(ConfigError("out-of-range: no-effect: x: y", setting="train.lr"))
    assert type(error) is ConfigError and str(error) == "rank 1: no-effect: x: y"
    assert error.data == {"code": "out-of-range", "setting": "train.lr"}
    twice = on_another_rank(error)
    assert str(twice) == "rank 1: rank 1: no-effect: x: y" and twice.data == error.data


def test_a_class_of_the_same_name_is_not_ours() -> None:
    theirs = type("DataError", (Exception,), {})
    assert from_another_process("DataError", "empty: x", {}) is None
    assert from_another_process("CODES", "x", {"code": "empty"}) is None
    error = on_another_rank(theirs("empty: x"))
    assert type(error) is PeerFailed and error.data == {"code": "peer-failed"}
    assert str(error) == "saving: rank 1 failed with DataError: empty: x"


@pytest.mark.parametrize(
    ("cause", "why"),
    [
        (None, "which is not installed"),
        (
            ModuleNotFoundError("No module named 'reasoning_gym'", name="reasoning_gym"),
            "which is not installed",
        ),
        (
            ModuleNotFoundError("No module named 'zss'", name="zss"),
            "cannot be imported (No module named 'zss')",
        ),
        (ImportError("libarrow.so: no such file"), "cannot be imported (libarrow.so: no such file)"),
    ],
)
def test_a_package_that_is_there_but_broken_is_not_called_missing(
    cause: ImportError | None, why: str
) -> None:
    error = missing_package("data.source", "reasoning-gym", cause=cause)
    assert why in str(error) and error.code == "missing-package"


def test_a_package_of_an_extra_is_installed_with_it() -> None:
    error = missing_package("rows.parquet", "pyarrow", extra="data")
    assert str(error).endswith("needs pyarrow, which is not installed; pip install 'lockstep-rl[data]'")
