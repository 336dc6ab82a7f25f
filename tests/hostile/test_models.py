"""Model folders that lie: options that make a document's numbers depend on its neighbours, sizes that their
weights do not have, links and pipes that lead out, templates that never end."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from classifiers import save_classifier
from raising import raises
from transformers import AutoTokenizer

from lockstep import loops
from lockstep.config.batch import RewardModelConfig
from lockstep.config.data import DataConfig
from lockstep.config.load import build
from lockstep.config.model import ModelConfig
from lockstep.data.chat import ChatFormat
from lockstep.errors import ConfigError, DataError, LockstepError, ModelError
from lockstep.models import reward
from lockstep.models.export import model_facts
from lockstep.models.folder import READ
from lockstep.models.load import _HUB_FILES, check_positions, load_model
from lockstep.models.reward import RewardModel

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that reads single bytes, with a chat template."""
    spec = importlib.util.spec_from_file_location("tiny_text", ROOT / "examples" / "tiny_text_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder: Path = module.save(tmp_path_factory.mktemp("model") / "tiny")
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "folder"))


def changed(folder: Path, **values: Any) -> Path:
    """The same folder with other values in config.json; None takes a key away."""
    file = folder / "config.json"
    config = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


def load(folder: Path, **more: Any) -> Any:
    return load_model(ModelConfig(name=str(folder), dtype="float32"), attention="sdpa", device=CPU, **more)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
    "original_max_position_embeddings": 64,
}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 8.0}


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_rotary_embeddings_that_depend_on_neighbours_bound_documents_at_every_door(
    folder: Path, kind: str, key: str
) -> None:
    rope = {"longrope": LONGROPE | {"original_max_position_embeddings": 48}, "dynamic": DYNAMIC}[kind]
    changed(folder, **({"rope_parameters": None, "max_position_embeddings": 64} | {key: rope}))
    bound = {"longrope": 48, "dynamic": 64}[kind]
    model = load(folder, materialize=False)
    assert (load(folder).max_positions, model.max_positions) == (bound, bound)
    assert model_facts(ModelConfig(name=str(folder))).max_positions == bound
    with raises(ConfigError, "too-long: rope_parameters"):
        check_positions(model, bound + 1, setting="data.max_prompt_tokens")


def reward_model(folder: Path) -> RewardModel:
    return RewardModel(RewardModelConfig(name=str(folder), dtype="float32"), device=CPU)


def saved_classifier(folder: Path, tiny: Path, **more: Any) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_key_value_heads": 4}
    return save_classifier(folder, AutoTokenizer.from_pretrained(tiny), **sizes | more)


def test_a_reward_models_score_does_not_depend_on_its_neighbours(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused by name; and, where the name is not known, by scoring alone and in a batch."""
    folder = saved_classifier(tmp_path / "longrope", tiny, rope_parameters=LONGROPE)
    with raises(ModelError, "unsupported-model: rope_type", value="longrope"):
        reward_model(folder)
    monkeypatch.setattr(reward, "check_rope", lambda config, **_: None)
    with raises(ModelError, "batch-dependent"):
        reward_model(folder)
    plain = reward_model(saved_classifier(tmp_path / "plain", tiny))
    forward = plain._forward
    monkeypatch.setattr(plain, "_forward", lambda rows: forward(rows) + (len(rows) - 1) * 0.01)
    with raises(ModelError, "batch-dependent"):  # whatever the reason
        plain._check_neighbours()


def test_a_reward_models_sizes_are_those_of_its_weights(tiny: Path, tmp_path: Path) -> None:
    folder = saved_classifier(tmp_path / "model", tiny)
    for values in ({"num_labels": 10**9}, {"num_hidden_layers": 10**9}):
        with raises(ModelError, f"out-of-range: {next(iter(values))}"):
            reward_model(changed(folder, **values))
        changed(folder, num_labels=None, num_hidden_layers=2)
    for values in ({"hidden_size": 2**16}, {"vocab_size": 2**23}, {"num_hidden_layers": 500}):
        with raises(ModelError, "wrong-shape: weights, files contain 86,592"):
            reward_model(changed(folder, **values))
        changed(folder, hidden_size=64, vocab_size=259, num_hidden_layers=2)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_documents_beyond_the_models_positions_are_refused(kind: str, folder: Path, tmp_path: Path) -> None:
    """GRPO always did: see tests/loop."""
    changed(folder, max_position_embeddings=64)
    row = {"prompt": "p" * 40, "chosen": "c" * 60, "rejected": "r", "completion": "c" * 60}
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(row) + "\n")
    run = {
        "kind": kind,
        "steps": 1,
        "batch_size": 1,
        "run_dir": str(tmp_path / "run"),
        "model": {"name": str(folder)},
        "data": {"source": str(data), "max_length": 256},
        "train": {"token_budget": 512},
    }
    with raises(DataError, "too-long: data.max_length"):
        loops.train(build(run, origin="test"))


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 10**400},
        {"num_hidden_layers": 1e300},
        {"num_hidden_layers": 900},
        {"num_hidden_layers": -1},
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": 3},
        {"vocab_size": 10**12},
        {"vocab_size": 2**24},
        {"hidden_size": 2**17},
        {"hidden_size": 10**15},
        {"intermediate_size": 2**20},
        {"intermediate_size": 1.5},
        {"num_attention_heads": 4096},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 3},
        {"head_dim": 4096},
        {"num_labels": 10**9},
        {"text_config": {"num_hidden_layers": 10**9}, "model_type": "gemma3"},
        {"model_type": "qwen2", "num_hidden_layers": 10**8},
        {"model_type": "gemma3_text", "sliding_window_pattern": 0},
        {"model_type": None},
        {"model_type": ["llama"]},
        {"model_type": "\x1b]0;pwn\x07"},
        {"hidden_act": "no such"},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"rope_parameters": {"rope_type": "llama3", "factor": "x"}},
        {"rope_parameters": []},
        {"rms_norm_eps": "small"},
        {"eos_token_id": {"a": 1}},
    ],
    ids=str,
)
def test_configs_that_lie_are_refused_in_one_line(folder: Path, values: dict[str, Any]) -> None:
    """Before anything is built: none of these takes more than a moment, or memory."""
    changed(folder, **values)
    for materialize in (True, False):
        with pytest.raises(ModelError) as error:
            load(folder, materialize=materialize)
        assert "\x1b" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"]
)
@pytest.mark.parametrize("text", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000, b"null"], ids=range(6))
def test_damaged_files_are_errors_in_one_line(folder: Path, name: str, text: bytes) -> None:
    (folder / name).write_bytes(text)
    try:
        load(folder)
    except LockstepError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("index", "what"),
    [
        ({"weight_map": {"model.embed_tokens.weight": "model-1.safetensors"}}, "missing-field: metadata"),
        ({"metadata": {}}, "missing-field: weight_map"),
        ({"metadata": {}, "weight_map": {"a": "../model.safetensors"}}, "cannot-read: weights"),
        ({"metadata": {}, "weight_map": {"a": 1}}, "missing-field: weight_map"),
        ({"metadata": {}, "weight_map": []}, "missing-field: weight_map"),
        ({"metadata": {}, "weight_map": {"a": "missing.safetensors"}}, "cannot-read: weights"),
        ([], "missing-field: weight_map"),
    ],
    ids=str,
)
def test_an_index_of_weights_is_checked(folder: Path, index: Any, what: str) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for materialize in (True, False):
        with raises(ModelError, what):
            load(folder, materialize=materialize)


def test_all_vocabularies_that_transformers_reads_are_checked_and_fetched() -> None:
    (package,) = importlib.util.find_spec("transformers").submodule_search_locations or ()  # type: ignore[union-attr]
    names = {"qwen.tiktoken"}  # read by a tokenizer that comes with its model, under trust_remote_code
    for file in Path(package).glob("**/tokenization*.py"):
        for found in re.findall(r"^VOCAB_FILES_NAMES = (\{.*?^\}|\{.*?\}$)", file.read_text(), re.M | re.S):
            names |= set(re.findall(r": \"(.+?)\"", found))
    assert len(names) > 20 and {Path(name).suffix for name in names} <= READ
    assert {f"*{Path(name).suffix}" for name in names} <= set(_HUB_FILES)


@pytest.mark.parametrize("name", ["vocab.bpe", "qwen.tiktoken", "source.spm"])
def test_no_vocabulary_is_a_link_that_leads_out(folder: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").touch()
    (folder / name).symlink_to(tmp_path / "outside")
    with raises(ModelError, f"leads-out-of-folder: {name}"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_no_link_or_pipe_leads_out_of_a_model_folder(folder: Path, tmp_path: Path, name: str) -> None:
    file = folder / name
    outside = tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    with raises(ModelError, f"leads-out-of-folder: {name}"):
        load(folder)
    file.unlink()
    os.mkfifo(file)
    with raises(ModelError, f"not-a-file: {name}"):
        load(folder)
    file.unlink()
    file.symlink_to(folder / "nothing")
    with raises(ModelError, f"not-a-file: {name}"):
        load(folder)
    file.unlink()
    file.symlink_to(outside.rename(folder / "real"))
    assert load(folder).dtype == torch.float32  # a link inside of the folder


def test_a_folder_of_the_hubs_cache_is_a_model_folder(folder: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert load(snapshot).dtype == torch.float32
    (tmp_path / "named").symlink_to(snapshot)
    assert load(tmp_path / "named").dtype == torch.float32
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../other/0")
    with raises(ModelError, "leads-out-of-folder: config.json"):
        load(snapshot)


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ [0] * 10**9 }}",
        "{{ 'x'|center(2 * 10**9) }}",
        "{{ strftime_now('%Y' * 10**9) }}",
        "{{ (range(90000)|list * 9999)|join('x') }}",
        "{% set n = namespace(t='x') %}{% for i in range(60) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
        "{{ 9 ** (9 ** 9) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
        "{% include 'x' %}",
        "{% import 'x' as x %}",
        "{{ raise_exception('\x1b]0;pwn\x07') }}",
        "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__()[0]() }}",
        "{% for",
    ],
)
def test_a_chat_template_has_budgets(tiny: Path, template: str) -> None:
    """An error in one line, or a text; the next template is rendered all the same."""
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = ChatFormat(DataConfig(chat_template=template + "{{ '' }}"), tokenizer)
    message = {"role": "user", "content": "hi"}
    with pytest.raises(DataError) as error:
        chat.render([message], generate=True, where="row 3")
    said = str(error.value)
    assert said.startswith("row 3: ") and "the chat template" in said and "\x1b" not in said
    plain = ChatFormat(DataConfig(), tokenizer)
    assert plain.render([message], generate=True, where="row 4").text == "<|user|>hi<|end|><|assistant|>"
