"""Files that grow, are cut, replaced and removed while they are read."""

from __future__ import annotations

from pathlib import Path

from lockstep.view.lines import GrowingLines, ends_of


def test_only_what_was_appended_is_read_and_half_a_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = GrowingLines(path, root=tmp_path)
    assert [*lines.read()] == [] and lines.problems == []
    path.write_bytes(b'{"a": 1}\n{"a": 2')
    assert [*lines.read()] == [{"a": 1}]
    with path.open("ab") as file:
        file.write(b'}\n\n{"a": 3}\n')
    assert [*lines.read()] == [{"a": 2}, {"a": 3}]
    assert ([*lines.read()], lines.generation, lines.problems) == ([], 0, [])


def test_damaged_lines_are_skipped_and_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": \n[1]\n\xff\xfe\n{"a": 2}\n')
    lines = GrowingLines(path, root=tmp_path)
    assert [*lines.read()] == [{"a": 1}, {"a": 2}]
    assert [text.split(":")[0] for text in lines.problems] == [f"metrics.jsonl, line {n}" for n in (2, 3, 4)]


def test_a_file_that_was_cut_replaced_or_removed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n')
    lines = GrowingLines(path, root=tmp_path)
    assert len([*lines.read()]) == 2
    # A resumed run cuts the file, and is soon longer than it was.
    path.write_bytes(b'{"a": 1}\n{"a": 5}\n{"a": 6}\n')
    assert ([*lines.read()], lines.generation) == ([{"a": 1}, {"a": 5}, {"a": 6}], 1)
    path.write_bytes(b'{"a": 1}\n')
    assert ([*lines.read()], lines.generation) == ([{"a": 1}], 2)
    path.unlink()
    assert ([*lines.read()], lines.generation, lines.problems) == ([], 3, [])
    path.write_bytes(b'{"a": 7}\n')
    assert [*lines.read()] == [{"a": 7}]


def test_a_link_out_of_the_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"a": 1}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").symlink_to(tmp_path / "secret")
    lines = GrowingLines(run / "metrics.jsonl", root=run)
    assert [*lines.read()] == [] and len(lines.problems) == 1


def test_the_ends_of_a_large_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {n}, "text": "{"x" * 500}"}}\n' for n in range(2000)))
    steps = [row["step"] for row in ends_of(path, root=tmp_path)]
    assert steps[0] == 0 and steps[-1] == 1999 and steps == sorted(set(steps)) and len(steps) < 700
