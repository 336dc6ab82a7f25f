"""Families that nobody named: each passes its proof as generic, or is refused with its first failing row.

`python tests/models/test_families.py` prints the table, families.txt.
"""

import logging
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from lockstep.cli.prove import prove
from lockstep.errors import ModelError
from lockstep.models.architectures import check_architecture
from lockstep.models.architectures.checks import reads_of

TABLE = Path(__file__).with_name("families.txt")
ROWS = dict(line.split(maxsplit=1) for line in TABLE.read_text().splitlines()) if TABLE.exists() else {}


def outcome(model_type):
    """transformers' default config, four layers and no dropout: the first row that fails, of those that
    training asks for, or how many hold."""
    config = AutoConfig.for_model(model_type, num_hidden_layers=4)
    for key in reads_of(config):
        if "dropout" in key or (key.endswith(("_pdrop", "layerdrop")) and hasattr(config, key)):
            setattr(config, key, 0.0)
    try:
        check_architecture(config)
    except ModelError as error:
        return f"refused: {plain(error)}"
    for held, row in enumerate(prove(config, name="m", everything=False)):
        if row.name == "decoded by engine native":
            return f"generic: {held} rows hold"
        if row.result == "failed":
            return f"refused: {row.name}: {plain(row.why)}"
    raise AssertionError("no row of engine native")


def plain(error):
    """The reason, short."""
    text = str(error).partition("is not supported: ")[2] or str(error)
    return text.split(";")[0].split(" (difference")[0][:110]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_type", ROWS)
def test_it_passes_or_is_refused_as_the_table_says(model_type, tmp_path, monkeypatch):
    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip("this version of transformers does not have it")
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    # The kind of result and the row; numbers may differ in their last digits.
    assert outcome(model_type).split(":")[:2] == ROWS[model_type].split(":")[:2]


if __name__ == "__main__":
    logging.disable()
    for name in sys.argv[1:] or ROWS:
        try:
            print(f"{name:22}{outcome(name)}", flush=True)
        except Exception as error:
            print(f"{name:22}error: {type(error).__name__}: {str(error)[:200]}", flush=True)
