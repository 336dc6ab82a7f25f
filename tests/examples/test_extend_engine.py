"""The engine of docs/how-to/extend.md: it passes the suite that ours pass, and trains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXTEND = ROOT / "examples" / "extend"

sys.path.insert(0, str(ROOT / "tests" / "engine"))
pytest.register_assert_rewrite("conformance")

from conformance import *  # noqa: E402, F403
from conformance import Subject, conformance_model  # noqa: E402
from conformance_parts import embedded  # noqa: E402

from lockstep.cli.main import main  # noqa: E402
from lockstep.config.engine import EngineConfig  # noqa: E402
from lockstep.engine.build import make_engine  # noqa: E402
from lockstep.schema.weights import WeightUpdate  # noqa: E402

NAME = "plain_engine:PlainEngine"


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXTEND))
        model = conformance_model()
        engine = make_engine(EngineConfig(name=NAME), model=model)

        yield from embedded(engine, model, refuses=frozenset({"stop"}))


def run(folder: Path, engine: str, *flags: str) -> int:
    words = ["train", "grpo", "--recipe", "tiny", "--steps", "4", "--run-dir", str(folder)]
    return main([*words, "--eval.no-before", "--eval.no-after", "--engine.name", engine, *flags])


def test_it_trains_as_hf_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXTEND))
    rows = {}
    for name in (NAME, "hf"):
        folder = tmp_path / name.partition(":")[0]
        assert run(folder, name) == 0
        rows[name] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(rows[NAME]) == 4
    for ours, theirs in zip(rows[NAME], rows["hf"], strict=True):
        assert ours["reward/mean"] == theirs["reward/mean"], "other completions: it missed an update"
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert ours["grad_norm"] > 0
    assert len({row["reward/mean"] for row in rows[NAME]}) == 4


def test_a_copy_takes_weights_over() -> None:
    """Where the trainer's Parameters are not whole in this process, an update brings tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXTEND))
        model = conformance_model()
        engine = make_engine(EngineConfig(name=NAME), model=model)
    new = {name: tensor + 1 for name, tensor in model.module.state_dict().items()}
    engine.update_weights(WeightUpdate(policy_version=3, tensors=lambda: iter(new.items())))
    assert all(tensor.equal(new[name]) for name, tensor in model.module.state_dict().items())
    assert engine.stats().policy_version == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "class Half:\n    external = False\n    def generate(self): ...\n",
            "engine.name = 'half_an_engine:Half' lacks submit, continue_, finished, abort, sleep, wake, "
            "stats, close, update_weights; see docs/how-to/extend.md",
        ),
        (
            "class Half:\n    external = True\n",
            "begin_update, receive, finish_update, fail_update, read_back",
        ),
        ("", "has no attribute 'Half'"),
    ],
)
def test_a_class_that_lacks_members_is_refused_before_anything_is_made(
    text: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "half_an_engine.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_an_engine", raising=False)
    monkeypatch.setattr("lockstep.loop.build.load_policy", None)  # a model is not even looked for
    assert run(tmp_path / "run", "half_an_engine:Half") == 2
    assert says in capsys.readouterr().err and not (tmp_path / "run").exists()
