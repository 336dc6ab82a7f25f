import json

from lockstep.cli.main import main
from lockstep.config.support import AXES, TABLE

CELL = {
    "backend": "local",
    "engine": "hf",
    "attention": "sdpa",
    "execution": "eager",
    "layout": "packed",
    "device": "cpu",
    "dtype": "float32",
}


def flags(**cell: str) -> list[str]:
    return [word for axis, value in cell.items() for word in (f"--{axis}", value)]


def test_without_axes_every_row_is_listed(tmp_path, capsys):
    assert main(["support", "--json", str(tmp_path / "s.json")]) == 0
    rows = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert len(rows) == len(TABLE)
    *_, verdict = capsys.readouterr().out.splitlines()
    counts = {s: sum(e.status == s for e in TABLE) for s in ("supported", "untested", "unsupported")}
    assert verdict.startswith("support: " + ", ".join(f"{n} {s}" for s, n in counts.items()))


def test_axes_leave_only_rows_that_may_apply(capsys):
    assert main(["support", *flags(attention="flex", device="cpu"), "--status", "unsupported"]) == 0
    out = capsys.readouterr().out
    assert "no backward on a CPU" in out
    assert "CUDA flash kernels do not support float32" not in out and "cuda" not in out
    assert main(["support", *flags(attention="hf:my_kernel"), "--status", "untested"]) == 0
    assert "hf:NAME" in capsys.readouterr().out


def test_a_whole_combination_gets_a_verdict_and_an_exit_status(tmp_path, capsys):
    assert set(CELL) == set(AXES)
    assert main(["support", *flags(**CELL)]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("support: supported")
    json_file = tmp_path / "s.json"
    assert main(["support", *flags(**CELL | {"attention": "flex"}), "--json", str(json_file)]) == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("support: unsupported: flex_attention has no")
    assert json.loads(json_file.read_text())["status"] == "unsupported"


def test_an_unknown_name_lists_the_known(capsys):
    assert main(["support", "--attention", "flx"]) == 2
    assert "--attention: unknown attention 'flx'; did you mean 'flex'?" in capsys.readouterr().err
