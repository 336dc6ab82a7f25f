"""What stands beside an implementation is all that config, the support table and commands need to know."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from raising import raises

import lockstep
from lockstep.config.declarations import backends, engines, read_declarations, rows_in_order
from lockstep.config.engine import EngineConfig
from lockstep.config.support import AXES, check_backend, check_own_settings
from lockstep.config.train import Execution, Layout, TrainConfig
from lockstep.errors import ConfigError


def test_a_file_beside_an_implementation_is_all_that_the_table_needs(tmp_path):
    for name in ("train", "engine/vllm", "attention", "config"):
        (tmp_path / name).mkdir(parents=True)
    row = '\n[[support]]\nstatus = "untested"\nreason = "new"\n'
    (tmp_path / "config" / "support.toml").write_text(row)
    with raises(ConfigError, "no-such-file"):
        read_declarations(tmp_path)
    (tmp_path / "train" / "one_support.toml").write_text(
        'axis = "execution"\nname = "one"\nplace = 2\n' + row
    )
    (tmp_path / "train" / "two_support.toml").write_text(
        'axis = "execution"\nname = "two"\nplace = 1\n' + row
    )
    refused = row.replace("untested", "unsupported") + 'instead = "other"\nlayout = ["padded"]\n'
    (tmp_path / "engine" / "vllm" / "support.toml").write_text('axis = "attention"\nname = "e"\n' + refused)
    found = read_declarations(tmp_path)
    first, both, rest = rows_in_order(found, "support", axes=("execution", "attention", None))
    assert (first.status, first.attention, first.layout) == ("unsupported", ("e",), ("padded",))
    assert both.execution == ("two", "one"), "rows alike but for the file's own value become one"
    assert rest.matches({})
    (tmp_path / "train" / "three_support.toml").write_text('axis = "execution"\nname = "one"\n')
    with raises(ConfigError, "duplicate"):
        read_declarations(tmp_path)
    (tmp_path / "train" / "three_support.toml").write_text('axis = "execution"\nname = "x"\n[[support]]\n')
    with raises(ConfigError, "wrong-field"):
        read_declarations(tmp_path)


def test_declared_settings_exist():
    train = {*TrainConfig.model_fields, "lora"}
    for backend in backends().values():
        conditions = [{} if isinstance(backend.shards_weights, bool) else backend.shards_weights]
        conditions += [refusal.when for refusal in backend.refuses]
        assert set(backend.reads).union(*conditions) <= train, backend.name
        for refusal in backend.refuses:
            assert refusal.error.format_map(dict(TrainConfig()) | {"lora": True})
    for engine in engines().values():
        places = {"in process", "started", "at a url"} if engine.external else {"embedded", "started"}
        assert set(engine.settings) <= places, engine.name
        for known in engine.settings.values():
            assert set(known) <= set(EngineConfig.model_fields), engine.name


def test_declared_modes_are_those_that_the_setting_takes():
    assert AXES["execution"] == get_args(Execution) and ("auto", *AXES["layout"]) == get_args(Layout)


def test_what_a_backend_of_the_users_reads_and_refuses():
    train = TrainConfig(backend="m:C", tp=2, optimizer="sgd")
    check_backend(train, lora=False)
    refusal = {
        "when": {"optimizer": ["sgd"], "lora": [True]},
        "error": "no {optimizer} with LoRA; set 'adamw'",
    }
    own = {"reads": ("tp",), "refuses": [refusal]}

    def refuses(**changes):
        return own | {"refuses": [refusal | changes]}

    check_own_settings(train, lora=False, **own)
    wrong = "train.backend = 'm:C': its attributes reads and refuses are invalid: "
    for problem, settings in (
        ("no sgd with LoRA", own),
        ("train.tp = 2 has no effect with train.backend = 'm:C': only fsdp2", own | {"reads": ()}),
        ("unknown setting 'optimiser'; did you mean", refuses(when={"optimiser": [1]})),
        (wrong, refuses(error=3)),
        (wrong + "'optimiser'", refuses(error="{optimiser}")),
        (wrong, own | {"reads": 3}),
    ):
        with pytest.raises(ConfigError) as found:
            check_own_settings(train, lora=True, **settings)
        assert problem in str(found.value)


TOY = """
axis = "backend"
name = "toy"
place = 9
object = "lockstep.train.toy:ToyBackend"
spans_ranks = true
memory = "lockstep.train.toy:memory_parts"
needs = { toy_package = "pip install toy" }

[doctor]
packages = ["toy_package"]

[reads]
ring = "it has rings"

[stacks]
options = ["ring"]

[[refuses]]
when = { optimizer = ["sgd"] }
error = "toy has no {optimizer}"

[[support]]
status = "unsupported"
execution = ["joint"]
reason = "toys do not join"
instead = "train.execution = 'eager'"
"""
ASK = """
import json
from lockstep.config.declarations import doctor_lines
from lockstep.config.run import SFTRun
from lockstep.config.run_config import on_ranks
from lockstep.config.support import AXES, support_rows
from lockstep.errors import ConfigError
from lockstep_lab.step_bench import cells
from lockstep_lab.train_parity.stacks import OPTIONS, parse_stack
from lockstep.train import BACKENDS

def refusal(**train):
    try:
        SFTRun(train={"backend": "toy", **train})
    except ValueError as error:
        return str(error)

on_ranks(SFTRun(train={"backend": "toy", "ring": 2, "layout": "packed"}), 2)
print(json.dumps({
    "axis": AXES["backend"],
    "class": BACKENDS["toy"],
    "bench": cells.AXES["backend"],
    "doctor": doctor_lines("backend")["toy"].packages,
    "stack": [parse_stack("toy:ring2").name, OPTIONS["ringN"]],
    "refusals": [refusal(optimizer="sgd"), refusal(execution="joint"), refusal(tp=2)],
}))
"""


def test_a_backend_is_added_by_adding_its_files(tmp_path: Path) -> None:
    """In a copy of the tree, of links, that has one file more."""
    source, copy = Path(lockstep.__file__).parent, tmp_path / "lockstep"
    (copy / "train").mkdir(parents=True)
    for folder in (source, source / "train"):
        for entry in folder.iterdir():
            if entry.name not in ("train", "__pycache__"):
                (copy / entry.relative_to(source)).symlink_to(entry)
    (copy / "train" / "toy_support.toml").write_text(TOY)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", ASK]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout)
    assert found["axis"] == found["bench"] == [*backends(), "toy"]
    assert found["class"] == "lockstep.train.toy:ToyBackend" and found["doctor"] == ["toy_package"]
    assert found["stack"] == ["toy:ring2", "N ranks share the tokens of each pack (fsdp2 or toy)"]
    optimizer, execution, tp = found["refusals"]
    assert "toy has no sgd" in optimizer
    assert "train.backend = 'toy', train.execution = 'joint' is not supported: toys do not join" in execution
    assert "train.tp = 2 has no effect with train.backend = 'toy': only fsdp2's mesh" in tp
