"""scripts/follow_value.py and scripts/step_closure.py on small trees whose counts are worked out by hand."""

from __future__ import annotations

import asyncio
import importlib.util
import queue
import sys
import threading
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def load(name: str, file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


follow_value = load("follow_value", SCRIPTS / "follow_value.py")

TREE = {
    "main": """
from app.checks import check
from app.loop import train
from app.settings import Config

def start(config: Config):
    check(config)
    train(ready := config.replaced())
""",
    "settings": """
from typing import Literal
Kind = Literal["a", "b"]
class Config:
    steps: int
    kind: Kind
    model: dict[str, str]
    def replaced(self) -> Config:
        return self
""",
    "checks": """
from app.errors import BadConfig, told
from app.plain import count, shown
from app.settings import Config

def check(settings: Config) -> None:
    count(settings.steps)
    shown(settings.kind)
    if settings.steps < 0:
        raise BadConfig(told(settings))
""",
    "errors": """
def told(config):
    return config
class BadConfig(Exception):
    def __init__(self, config):
        self.config = config
""",
    "plain": """
def count(steps): return steps
def shown(kind): return kind
""",
    "loop": """
from app.model import load
from app.session import Session

def train(run):
    with Session(run) as session:
        session.open()
        load(run.model)
        after(run)

def after(never):
    pass
""",
    "session": """
class Session:
    def __init__(self, run):
        self._run = run
        self.path = "runs"
    def open(self):
        self._look()
        self.free()
    def _look(self):
        return self._run
    def free(self):
        return self.path
""",
    "model": "def load(model): return model\n",
    "step": """
from app.records import Batch
from app.score import Scorer

async def step(scorer: Scorer):
    groups = await sampled()
    for place, group in enumerate(groups):
        batch = Batch(rows=group.rows, place=place)
        await scorer.score(batch)
    return len(groups)

async def sampled():
    return [1]
""",
    "records": """
from dataclasses import dataclass
@dataclass
class Batch:
    rows: list[int]
    place: int
""",
    "score": """
from app.records import Batch
class Scorer:
    async def score(self, batch: Batch):
        scores = await self.each(batch.rows)
        self.note(batch.place)
        return scores
    async def each(self, rows):
        return [row for row in rows]
    def note(self, place):
        return place
""",
}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()
    for name, text in TREE.items():
        (tmp_path / "app" / f"{name}.py").write_text(text)
    return tmp_path


def test_a_config_until_the_model_is_loaded(source: Path) -> None:
    walk = follow_value.Walk(follow_value.Source(source), until="app.model:load")
    walk.run("app.main:start:config")
    # Plain parts are not followed, `raise` is not read, and the model's module is not entered.
    assert set(walk.rooms) == {"app.main", "app.checks", "app.settings", "app.loop", "app.session"}
    # check, Config.replaced, Session.__init__, _look, open; `free` never names it, `train` is not left.
    assert walk.returns == 5
    assert walk.names == {"config", "settings", "ready", "run", "_run", "session"}


def test_groups_through_a_step(source: Path) -> None:
    walk = follow_value.Walk(follow_value.Source(source))
    walk.run("app.step:step:groups")
    assert set(walk.rooms) == {"app.step", "app.score"}
    assert walk.returns == 2  # score, each; the place of a group is a number
    assert walk.names == {"groups", "group", "batch", "rows", "row", "scores"}


@pytest.mark.parametrize(
    ("start", "until", "part"),
    [
        ("app.main:begin:config", None, "no function app.main:begin"),
        ("app.main:start:other", None, "binds no variable 'other'"),
        ("app.step:step:groups", "app.model:load", "never comes to app.model:load"),
        ("app.main:start:config", "app.model:gone", "no function app.model:gone"),
    ],
)
def test_what_was_renamed_is_said(source: Path, start: str, until: str | None, part: str) -> None:
    with pytest.raises(LookupError, match=part):
        follow_value.Walk(follow_value.Source(source), until=until).run(start)


def test_the_default_walks_find_their_ends(capsys: pytest.CaptureFixture[str]) -> None:
    assert follow_value.main([]) == 0
    printed = capsys.readouterr().out
    assert [line.split(":")[0] for line in printed.splitlines()] == list(follow_value.WALKS)


def test_async_functions_and_running_threads_are_entered(tmp_path: Path) -> None:
    step_closure = load("step_closure", SCRIPTS / "step_closure.py")
    file = tmp_path / "toy.py"
    file.write_text(
        "async def inner(): pass\n"
        "async def outer(): await inner()\n"
        "def in_thread(): pass\n"
        "def served(asked, done):\n"
        "    while (work := asked.get(timeout=60)) is not None:\n"
        "        work()\n"
        "        done.put(None)\n"
        "def earlier(): return [x for x in (1,)]\n"
        "def never(): pass\n"
    )
    toy = load("toy", file)
    asked: queue.Queue[object] = queue.Queue()
    done: queue.Queue[None] = queue.Queue()
    entered = step_closure.Entered(tmp_path)
    thread = threading.Thread(target=toy.served, args=(asked, done))
    thread.start()
    toy.earlier()

    def work() -> None:
        asyncio.run(toy.outer())
        asked.put(toy.in_thread)
        done.get(timeout=60)

    codes = entered.by(work)
    asked.put(None)
    thread.join(60)
    assert {code.co_qualname for code in codes} == {"inner", "outer", "in_thread"}
