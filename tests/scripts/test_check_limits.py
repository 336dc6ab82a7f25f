"""scripts/check_limits.py on numbers that are worked out by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_limits.py"
_spec = importlib.util.spec_from_file_location("check_limits", SCRIPT)
assert _spec is not None and _spec.loader is not None
check_limits = importlib.util.module_from_spec(_spec)
sys.modules["check_limits"] = check_limits
_spec.loader.exec_module(check_limits)


def test_lines_of_raise_statements_are_counted_and_bounded(tmp_path: Path) -> None:
    path = tmp_path / "src" / "lockstep" / "one.py"
    path.parent.mkdir(parents=True)
    path.write_text('"""Doc."""\n\n# why\nx = 1\nif x:\n    raise ValueError(\n        "no"\n    )\n')
    raised, code = check_limits.raised_lines([path, tmp_path / "tests" / "other.py"], tmp_path)
    assert (raised, code) == (3, 5)
    (excess,) = check_limits.check_raised(raised, code)
    assert excess.startswith("src: 3 of 5 lines of code belong to raise statements, at most 6.5%")
    assert not [*check_limits.check_raised(65, 1000)] and [*check_limits.check_raised(66, 1000)]


def test_the_page_of_lockstep_view_is_bounded_without_what_is_vendored(tmp_path: Path) -> None:
    texts = {
        "view/server.py": '"""Doc."""\n\nx = 1\n' * 100,
        "view/templates/a.html.j2": "{# why #}\n<p>\n" * 700,
        "view/static/view.js": "// why\n\n  /* why */\nf();\n" * 700,
        "view/static/other/library.js": "f();\n" * 700,
        "view/runs.py": "x = 1\n" * 700,
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in texts]
    assert not [*check_limits.check_page(files, tmp_path)]
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "view.py").write_text("x = 1\n")
    (excess,) = check_limits.check_page([*files, tmp_path / "cli" / "view.py"], tmp_path)
    assert excess.endswith("/view: the page has 1,501 lines of code, at most 1,500")
