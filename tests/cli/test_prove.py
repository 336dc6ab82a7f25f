"""lockstep prove: the table, the file, and what it says of a model that fails."""

import json

import pytest
from raising import raises
from transformers import AutoConfig

from lockstep.cli import prove
from lockstep.errors import ModelError
from lockstep.models import admission
from lockstep.models.architectures import ARCHITECTURES
from lockstep.models.shape_table import SHAPES


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(admission, "_memory", {})


def folder(path, model_type, **changes):
    """A model folder with a config and nothing else: a proof reads no weights."""
    values = SHAPES["tiny-llama"] | changes | {"model_type": model_type}
    AutoConfig.for_model(**values).save_pretrained(path)
    return str(path)


def test_a_model_with_a_record_passes_in_every_row(capsys, tmp_path):
    file = tmp_path / "proof.json"
    assert prove.main(["shape:tiny-gemma3", "--json", str(file)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "prove: shape:tiny-gemma3 (gemma3_text): 18 rows hold, 0 refused"
    )
    report = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert report["has_record"] and report["passed"] and len(rows) == 18
    assert 0 < rows["with a shared prompt (varlen)"]["gradients"] < 1e-5
    assert rows["batch-invariant, packed"]["logprobs"] == 0.0
    assert {"decoded by engine native", "packed, with LoRA", "packed, value head"} < rows.keys()


def test_a_model_without_a_record_is_generic(capsys, tmp_path):
    assert prove.main([folder(tmp_path / "m", "starcoder2"), "--json", str(tmp_path / "p.json")]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.endswith("(starcoder2, generic): 15 rows hold, 2 refused")
    refused = {r["name"]: r["why"] for r in json.loads((tmp_path / "p.json").read_text())["rows"] if r["why"]}
    assert refused.keys() == {"decoded by engine native", "batch-invariant"}
    assert "set engine.name = 'hf'" in refused["decoded by engine native"]


def test_a_model_that_computes_something_else_fails_with_the_first_row(capsys, tmp_path, monkeypatch):
    """Without its record nobody scales the logits of a Cohere 2."""
    monkeypatch.delitem(ARCHITECTURES, "cohere2")
    name = folder(tmp_path / "m", "cohere2", logit_scale=0.5)
    assert prove.main([name]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert "(cohere2, generic): fails: alone (sdpa): the logprob of a token" in last
    assert "allowed 0.0001" in last
    with raises(ModelError, "unsupported-model: alone (sdpa)"):
        admission.admit(AutoConfig.from_pretrained(name), name=name)


def test_a_model_that_cannot_run_packed_fails(capsys, tmp_path):
    """Nemotron's layers keep the arguments of attention to themselves."""
    name = folder(tmp_path / "m", "nemotron", hidden_act="relu2")
    assert prove.main([name]) == 1
    assert "fails: forward: attention kernel" in capsys.readouterr().out.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "unsupported-model: quantised weights"),
        ({"auto_map": {"AutoConfig": "own.Config"}, "model_type": "own"}, "cannot-read: trust_remote_code"),
        ({"attention_dropout": 0.5}, "unsupported-model: attention_dropout = 0.5"),
        ({"model_type": "nothing"}, "cannot-read: nothing"),
    ],
)
def test_what_is_refused_before_any_row(changes, match, tmp_path):
    name = folder(tmp_path / "m", "llama")
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with raises(ModelError, match):
        prove.main([name])


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in SHAPES if name.startswith("tiny")])
def test_compiled_layers_and_bfloat16(name, tmp_path):
    file = tmp_path / "proof.json"
    assert prove.main([f"shape:{name}", "--all", "--json", str(file)]) == 0
    rows = {row["name"]: row for row in json.loads(file.read_text())["rows"]}
    assert rows["packed, bfloat16"]["result"] == "passed"
    assert rows["packed, compiled"]["result"] == "passed"
