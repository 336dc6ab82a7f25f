"""Crashes, and refusals without a fault: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib.util
import io
import json
import os
import pickle
import re
import resource
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matrix_results
import pytest
import torch
import transformers
from chats import smollm2, trained_text, write_rows
from pydantic import BaseModel
from raising import raises

from lockstep.cli.main import main
from lockstep.cluster.jobs import packed
from lockstep.cluster.rank_host import staying, travelling
from lockstep.cluster.ray import check_token
from lockstep.config.load import RUN_KINDS, load_run
from lockstep.config.model import _OTHERS, LINEAR, LoraConfig, ModelConfig
from lockstep.config.problems import OTHER_NAMES, ours, tables
from lockstep.data.sources import missing_column
from lockstep.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    LockstepError,
    ModelError,
    ParityError,
    RecordingError,
    RewardError,
    TrainError,
    underway,
)
from lockstep.models.architectures import ARCHITECTURES
from lockstep.models.export import export_hf, export_tensors
from lockstep.models.load import load_model
from lockstep.models.lora import targets_of
from lockstep.observe.files import naming, write_atomic
from lockstep.observe.flight import FlightRecorder
from lockstep.observe.tensor_file import save_tensors
from lockstep.ranks.hang import examine
from lockstep.ranks.watchdog import name_recording
from lockstep.recording import reader
from lockstep.schema.batch import PolicyBatch
from lockstep.train.local import LocalBackend
from lockstep_lab.matrix.report import report
from lockstep_lab.matrix.run import with_signal
from lockstep_lab.replay.results import ReplayFiles, ReplayRow
from lockstep_lab.suite.job_files import Job
from lockstep_lab.suite.report import markdown, page
from lockstep_lab.suite.worker import append_rows

ROOT = Path(__file__).parents[2]

# 14. LoRA targets


@pytest.mark.parametrize(
    ("targets", "code", "said"),
    [
        # Refused before anything is loaded or made, with what to choose instead: by hand.
        (["embed_tokens"], "unknown-name", "'embed_tokens' is the embedding"),
        (["q_proj", "model.embed_tokens"], "unknown-name", "'embed_tokens' is the embedding"),
        (["lm_head"], "unknown-name", "'lm_head' is the head"),
        (["q_proj", "v_prj"], "unknown-name", "did you mean 'v_proj'"),
        (["norm"], "unknown-name", "unknown linear module 'norm'"),
        (["c_attn"], "unknown-name", "Known: all-linear, down_proj"),
        (["q_proj", "all-linear"], "unknown-name", "already means"),
        ([], "nothing-to-do", "names no module"),
    ],
)
@pytest.mark.parametrize(("kind", "section"), [("sft", "model"), ("ppo", "value")])
def test_every_lora_target_is_checked(
    targets: list[str], code: str, said: str, kind: str, section: str
) -> None:
    with raises(ConfigError, code) as caught:
        load_run(kind=kind, overrides={f"{section}.lora.target_modules": targets})
    assert said in str(caught.value) and f"{section}.lora.target_modules" in str(caught.value)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_all_linear_is_what_transformers_has(model_type: str) -> None:
    """Expected: the linear modules of transformers' own module, but the head."""
    # transformers cannot build a Ministral of its own default config, which has no head_dim.
    head = {"head_dim": 16} if model_type == "ministral" else {}
    config = transformers.AutoConfig.for_model(model_type, num_hidden_layers=1, hidden_size=64, **head)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    linear = {path for path, part in module.named_modules() if isinstance(part, torch.nn.Linear)}
    names = {path.rpartition(".")[2] for path in linear} - {"lm_head", "embed_out"}
    assert names <= {*LINEAR, *_OTHERS}
    # By default all of them, but the gates of shared experts and of delta nets, which have few outputs.
    gates = {"shared_expert_gate", "in_proj_a", "in_proj_b", "in_proj_ba"}
    assert {*targets_of(module, LoraConfig())} == names - gates


# end of 14


# 15. Token ids beyond the embedding

# tests/loop/test_documents.py

# end of 15


# 16. Full disks, own functions and huge rewards


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond `size` bytes: what a full disk does, by EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 200 KiB at `folder`."""
    folder.mkdir(exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def tiny_module() -> torch.nn.Module:
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    return load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module


def whole_export(folder: Path) -> None:
    export_hf(tiny_module(), None, folder / "export")


def export_of_parts(folder: Path) -> None:
    module = tiny_module()
    weights = module.state_dict().items()
    export_tensors(module, weights, tokenizer=None, directory=folder / "export", dtype=torch.float32)


@pytest.mark.parametrize("full", ["limit", "disk"])
@pytest.mark.parametrize("write", [whole_export, export_of_parts])
def test_an_export_on_a_full_disk_names_the_file(
    write: Callable[[Path], None], full: str, tmp_path: Path
) -> None:
    """Expected: one error with the file's name and the system's reason, and no trace; by hand."""
    folder = tmp_path / "disk"
    folder.mkdir()
    with largest_file(100_000) if full == "limit" else small_disk(folder):
        with raises(ModelError, "cannot-write: export") as caught:
            write(folder)
        assert list(folder.iterdir()) == []
    reason = os.strerror(errno.EFBIG if full == "limit" else errno.ENOSPC)
    assert reason in str(caught.value) and f"{folder}/export/" in str(caught.value)
    assert ".safetensors" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.safetensors", lambda path: save_tensors({"x": torch.zeros(1000)}, path)),
        ("a.json", lambda path: write_atomic(path, "x" * 4000)),
        ("a.jsonl", lambda path: append_rows(path, [Row(text="x" * 4000)])),
        ("job.json", lambda path: Work(out=path.parent, text="x" * 4000).write()),
        ("results.jsonl", lambda path: replay_row(path.parent)),
    ],
)
def test_a_file_that_cannot_be_written_is_named(
    name: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    """Expected: the system's error with the file's name, which the command line prints; by hand."""
    with largest_file(1000), pytest.raises(OSError) as caught:
        write(tmp_path / name)
    assert caught.value.errno == errno.EFBIG
    assert Path(caught.value.filename).name == name


def test_a_tokenizer_that_cannot_be_written_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    """Expected: as above; the package tokenizers raises a plain Exception."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = None  # or its file would be the first
    with largest_file(1000), pytest.raises(OSError) as caught, naming(tmp_path):
        tokenizer.save_pretrained(tmp_path)
    assert caught.value.errno == errno.EFBIG
    assert Path(caught.value.filename) == tmp_path / "tokenizer.json"


def test_an_error_without_a_number_keeps_its_text(tmp_path: Path) -> None:
    """Expected: the text of the error, as transformers' OSErrors have one alone; by hand."""
    with pytest.raises(OSError, match=r"^no such revision$") as caught, naming(tmp_path):
        raise OSError("no such revision")
    assert caught.value.filename is None


class Row(BaseModel):
    text: str


class Work(Job):
    text: str


def replay_row(folder: Path) -> None:
    files = ReplayFiles(folder / "replay", echo=lambda _: None)
    rows = {field.name: "x" * 4000 for field in dataclasses.fields(ReplayRow)}
    files.row(ReplayRow(**rows))  # type: ignore[arg-type]


def test_a_run_whose_export_fails_says_how_to_make_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expected: exit status 1 and one line; the command that it names makes the export; by hand."""
    run, real = tmp_path / "run", LocalBackend.export

    def on_full_disk(self: LocalBackend, directory: Path) -> None:
        with largest_file(10_000):
            real(self, directory)

    words = ["train", "grpo", "--recipe", "tiny", "--steps", "1", "--eval.no-before", "--eval.no-after"]
    with monkeypatch.context() as patch:
        patch.setattr(LocalBackend, "export", on_full_disk)
        assert main([*words, "--run-dir", str(run)]) == 1
    error = capsys.readouterr().err
    assert f"{run}/export/model.safetensors cannot be written (File too large)" in error
    assert f"lockstep train --resume {run}" in error and "Traceback" not in error
    assert main(["train", "--resume", str(run)]) == 0
    assert (run / "export/model.safetensors").is_file()


# end of 16


# 17. Batch sizes of KTO

# tests/loop/test_documents.py

# end of 17


# 18. Small sets, and all faults at once

# Rows: tests/loop/test_starts.py.

# end of 18


# 19. Own rows without rewards

# Rows: tests/loop/test_starts.py.

# end of 19


# 20. Templates that end a conversation with eos

# As Phi-3's.
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""
TURNS = [
    {"role": r, "content": t}
    for r, t in (("user", "Hi"), ("assistant", "One"), ("user", "And"), ("assistant", "Two"))
]


@pytest.mark.parametrize(
    ("turns", "trained"), [(2, "One<|end|>\n<|im_end|>"), (4, "One<|end|>Two<|end|>\n<|im_end|>")]
)
def test_a_template_that_writes_an_eos_where_no_answer_is_asked_for(turns, trained, tmp_path):
    source = write_rows(tmp_path, [{"messages": TURNS[:turns]}], kind="jsonl")
    tokenizer = smollm2("<|end|>", "<|user|>", "<|assistant|>")
    assert trained_text(source, tokenizer, chat_template=PHI) == trained


# end of 20


# 21. Failed starts leave no run directory

# Rows: tests/loop/test_starts.py.

# end of 21


# 22. Names that nearly match


@pytest.mark.parametrize(
    ("argv", "near"),
    [
        # the slip                                       the name that exists here
        (["gropo", "--recipe", "tiny"], "'grpo'"),
        (["gropo"], "'grpo'"),
        (["tniy"], "'tiny'"),
        (["grpo", "--train.lrr", "1"], "--train.lr?"),
        (["grpo", "--train.lr-schedule=cosine"], "--train.schedule?"),
        (["grpo", "--eval.no-befor"], "--eval.before?"),
        (["grpo", "--rank", "2"], "--ranks"),
        # a name of TRL, OpenRLHF, verl                  its row in coming-from.md
        (["grpo", "--train.learning-rate", "1e-6"], "--train.lr?"),
        (["sft", "--learning_rate", "1e-6"], "--train.lr?"),
        (["grpo", "--num_generations", "4"], "--rollout.group-size?"),
        (["grpo", "--rollout.n", "4"], "--rollout.group-size?"),
        (["grpo", "--rollout.n_samples_per_prompt", "4"], "--rollout.group-size?"),
        (["ppo", "--algo.advantage.lambd", "1"], "--algorithm.lam?"),
    ],
)
def test_an_unknown_word_of_train_suggests_the_nearest(argv, near, capsys):
    assert main(["train", *argv]) == 2
    told = capsys.readouterr().err
    assert f"did you mean {near}" in told


def test_an_unknown_flag_of_another_command_suggests_the_nearest(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["status", "run", "--legder"])
    assert (caught.value.code, "did you mean --ledger?" in capsys.readouterr().err) == (2, True)


@pytest.mark.parametrize(
    ("column", "row", "near"),
    [
        ("question", {"solution": 1, "id": 2}, []),
        ("question", {"solution": 1, "problem": 2}, ["problem"]),
        ("promt", {"prompt": 1, "solution": 2}, ["prompt"]),
        ("answer", {"question": 1, "solution": 2}, ["solution"]),
    ],
)
def test_a_missing_column_suggests_what_was_meant(column, row, near):
    told = str(missing_column(column, row, setting="data.x", source="rows.jsonl"))
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "(data.x). Columns:"
    assert hint in told


def test_the_names_of_other_frameworks_are_those_of_the_table_for_their_users():
    page = Path(__file__).parents[2] / "docs" / "how-to" / "coming-from.md"
    rows = [line[2:].split(" | ", 1) for line in page.read_text().splitlines() if line.startswith("| ")]
    parts = [(set(re.findall(r"[\w.]+", there)), here) for there, here in rows]
    known = {
        f"{table}.{name}".lstrip(".")
        for run in RUN_KINDS.values()
        for table, model in tables(run).items()
        for name in model.model_fields
    }
    for other, settings in OTHER_NAMES.items():
        last = other.rpartition(".")[2]
        right = " ".join(here for there, here in parts if other in there or last in there)
        for setting in settings:
            assert setting in known, (other, setting)
            assert setting in right or f"`{setting.rpartition('.')[2]}" in right, (other, setting)
    # And back: where a row has as many names there as settings here, each pair is known.
    missing, values = [], {"gspo", "cispo", "sapo"}
    for there, here in rows:
        quoted = re.findall(r"`([^`]+)`", there)
        theirs = [
            name.lstrip("-") for name in quoted if re.fullmatch(r"-*[a-z_.]{4,}", name) and name not in values
        ]
        settings_here = [
            name for name in re.findall(r"`([\w.]+)[^`]*`", here) if "." in name and name in known
        ]
        if len(theirs) == len(quoted) == len(settings_here):
            pairs = zip(theirs, settings_here, strict=True)
            missing += [(o, s) for o, s in pairs if not s.endswith(o.rpartition(".")[2]) and s not in ours(o)]
    assert missing == [], "\n".join(map(str, missing))


# end of 22


# 23. Exit codes


@pytest.mark.parametrize(
    ("kind", "code", "begun", "status"),
    [
        # docs/reference/cli.md: 2 for what was given, before the first step or result; else 1
        (ConfigError, "out-of-range", False, 2),
        (DataError, "no-such-file", False, 2),
        (ModelError, "no-such-file", False, 2),
        (CheckpointError, "damaged-file", False, 2),
        (RecordingError, "damaged-file", False, 2),
        (DataError, "wrong-row", True, 1),
        (ConfigError, "no-effect", True, 1),
        (RewardError, "reward-failed", False, 1),
        (EngineError, "process-died", False, 1),
        (TrainError, "no-space", False, 1),
        (ParityError, "values-differ", False, 1),
        (DataError, "wrong-state", False, 1),
    ],
)
def test_the_exit_status_of_an_error(kind, code, begun, status):
    with pytest.raises(LockstepError) as caught, underway(lambda: begun):
        raise kind("", code=code)
    assert caught.value.status == status
    assert pickle.loads(pickle.dumps(caught.value)).status == status


# Rows of every command: tests/cli/test_exit_status.py.

# end of 23


# 24. Values, lines and lengths in messages


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["grpo", "--steps", "-1"], "steps = -1: expected a number greater than 0"),
        (
            ["ppo", "--algorithm.gamma", "1.5"],
            "algorithm.gamma = 1.5: expected a number less than or equal to 1",
        ),
        (
            ["grpo", "--rollout.sampling.top-p", "0"],
            "rollout.sampling.top_p = 0.0: expected a number greater than 0",
        ),
    ],
)
def test_a_value_out_of_range_is_shown_with_its_bound(argv, told, capsys):
    assert main(["train", *argv]) == 2
    assert capsys.readouterr().err.splitlines()[-1].strip() == told


@pytest.mark.parametrize("argv", [["sample", "runs/nope"], ["chat", "runs/nope"]])
def test_a_run_that_does_not_exist_is_not_looked_for_on_the_hub(argv, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "nape").mkdir(parents=True)
    (tmp_path / "runs" / "nape" / "config.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert "no such run directory" in told and "did you mean 'runs/nape'?" in told and "hub" not in told


# tests/loop/test_documents.py

# end of 24


# 25. Submit, the environment of ranks, and cluster.md: with a real cluster in tests/cluster/test_ray.py


@pytest.mark.parametrize(
    ("names", "travels", "stays"),
    [
        # What every rank gets of the driver's shell, and what is the node's own: docs/how-to/cluster.md.
        (["WANDB_MODE", "WANDB_BASE_URL", "WANDB_PROJECT"], True, False),
        (
            ["HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HF_HUB_DISABLE_IMPLICIT_TOKEN"],
            True,
            False,
        ),
        (["TOKENIZERS_PARALLELISM", "TORCH_LOGS", "TORCHINDUCTOR_FX_GRAPH_CACHE"], True, False),
        (["HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"], False, True),
        (["http_proxy", "https_proxy", "no_proxy", "all_proxy"], False, True),
        (["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR"], False, True),
        (["TORCH_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"], False, True),
        (["HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "WANDB_DIR"], False, True),
        (["HF_TOKEN", "WANDB_API_KEY", "HF_TOKEN_PATH", "OF_MINE"], False, False),
    ],
)
def test_a_rank_gets_what_the_page_says(names: list[str], travels: bool, stays: bool) -> None:
    shell = dict.fromkeys(names, "1")
    assert travelling(shell) == (shell if travels else {})
    assert staying(shell) == (shell if stays else {})
    with_password = dict.fromkeys(names, "https://me:secret@host/path")
    assert travelling(with_password) == {}, "a password would stand in the job's record"


_SUBMITTED: dict[str, Any] = {"run_dir": "/data/run"}


@pytest.mark.parametrize(
    ("settings", "include", "refused"),
    [
        # A job runs in a folder of Ray's that has what was sent along: by hand.
        ({"data.source": "data/rows.jsonl"}, [], "data.source"),
        ({"data.source": "rows.parquet"}, [], "data.source"),
        ({"data.source": "here.jsonl"}, [], "data.source"),
        ({"model.name": "./model"}, [], "model.name"),
        ({"model.name": "../model"}, [], "model.name"),
        ({"cluster.temp_dir": "ray"}, [], "cluster.temp_dir"),
        ({"eval_data.source": "data/rows.jsonl"}, [], "eval_data.source"),
        ({"data.source": "here.jsonl"}, ["here.jsonl"], None),
        ({"data.source": "/data/rows.jsonl"}, [], None),
        ({"data.source": "~/rows.jsonl"}, [], None),
        ({"data.source": "openai/gsm8k", "model.name": "org/model-1.5"}, [], None),
    ],
)
def test_a_file_that_a_job_would_not_have_is_refused(
    settings: dict[str, Any],
    include: list[str],
    refused: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    Path("here.jsonl").write_text("{}")
    run = load_run(kind="grpo", overrides={"rewards": [{"name": "exact_match"}]} | _SUBMITTED | settings)
    extra = [Path(name) for name in include]
    if refused is None:
        with packed(run, extra=extra) as folder:
            assert {path.name for path in folder.iterdir()} == {"run.toml", *include}
    else:
        with raises(ConfigError, f"no-such-file: {refused}"), packed(run, extra=extra):
            pass


@pytest.mark.parametrize("groups", [[["policy"]], [["policy", "value"]]])
def test_colocate_names_every_role(groups: list[list[str]]) -> None:
    """Expected: docs/how-to/cluster.md, "Every role of the run belongs to exactly one group"."""
    overrides = {"algorithm.kl.coef": 0.1, "cluster.colocate": groups}
    with raises(ConfigError, "missing-setting: cluster.colocate, ref"):
        load_run(kind="ppo", overrides=overrides)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_the_token_of_the_page_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of docs/how-to/cluster.md, as they stand there."""
    page = (ROOT / "docs/how-to/cluster.md").read_text()
    steps = re.findall(
        r"^\| `(ray get-auth-token --generate)`, then `(chmod 600 ~/.ray/auth_token)`", page, re.M
    )
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for command in steps[0]:
        subprocess.run(command, shell=True, check=True, capture_output=True)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_token("auto")


def _hung(folder: Path, *, outcome: str, step: int) -> str:
    """What `lockstep hang` says of a run that stands in the micro-batch 1 of step 3, by its record; its
    recording has inputs of a step.

    Args:
        outcome: of the inputs.
    """
    recorder = FlightRecorder(folder / "logs/flight", rank=0, world_size=1)
    recorder.note(step=3, phase="forward_backward", micro_batch=1, inputs=[5, 6])
    recorder.close()
    rank = folder / "recordings/rank-0000"
    rank.mkdir(parents=True)
    inputs = [{"meta": {"step": step, "micro_batch": at, "outcome": outcome}} for at in (0, 1)]
    header = json.dumps({"__metadata__": {"inputs": json.dumps(inputs)}}).encode()
    (rank / "open-000003.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return name_recording(examine(folder / "logs/flight")).text()


@pytest.mark.parametrize(
    ("outcome", "step", "named"),
    [("pending", 3, True), ("finished", 3, False), ("pending", 2, False)],
)
def test_hang_names_the_recording_to_replay(outcome: str, step: int, named: bool, tmp_path: Path) -> None:
    """Expected: docs/how-to/hangs.md; the command is the one that replays inputs of step 3 alone."""
    folder = tmp_path / "the run"
    said = _hung(folder, outcome=outcome, step=step)
    line = f"the inputs of rank 0, micro-batch 1 of step 3, are in {folder}/recordings; "
    command = f"lockstep replay '{folder}' --steps 3:4"
    assert (line in said) == named and (command in said) == named


# end of 25


# 36. The lowest supported Python


@pytest.mark.parametrize(
    ("member", "expected"),
    [
        # Python 3.11.2 has no TarFile.extractall(filter=). Source: PEP 706, on `filter="data"`.
        (("corpus/a.json", tarfile.REGTYPE, ""), {"corpus/a.json"}),
        (("corpus", tarfile.DIRTYPE, ""), set()),
        (("../a.json", tarfile.REGTYPE, ""), None),
        (("/tmp/a.json", tarfile.REGTYPE, ""), None),
        (("corpus/a.json", tarfile.SYMTYPE, "/etc/passwd"), None),
        (("corpus/a.json", tarfile.LNKTYPE, "/etc/passwd"), None),
        (("corpus/a.json", tarfile.FIFOTYPE, ""), None),
    ],
)
def test_the_shipped_archive_is_unpacked_by_every_python(member, expected, tmp_path):
    """The files that are written, or None: refused."""
    packed = io.BytesIO()
    name, kind, target = member
    with tarfile.open(fileobj=packed, mode="w") as archive:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind, target
        archive.addfile(info)
    packed.seek(0)
    refused = raises(RecordingError, f"damaged-file: {reader.ARCHIVE.name}")
    with tarfile.open(fileobj=packed) as archive, refused if expected is None else contextlib.nullcontext():
        reader._extract(archive, tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if not path.is_dir()} == (
        expected or set()
    )


# end of 36


# 37. File descriptors under attack

# end of 37


# 38. Matrix on inputs without a signal


ZERO = dict.fromkeys(("gradient_relative_error", "gradient_cosine", "worst_parameter"))


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        # A cell that works and agrees is no problem, whatever could not be compared: by hand.
        ({"comparison": matrix_results.comparison(**ZERO, gradient_note="they are zero")}, False),
        ({"agrees": False, "disagreement": "too far"}, True),
        ({"status": "failed", "reason": "it raised"}, True),
    ],
)
def test_a_note_is_no_failure_of_a_matrix(changes: dict[str, Any], shown: bool) -> None:
    cells = matrix_results.reference(), matrix_results.cell(**changes)
    described = report(matrix_results.result(*cells))
    assert bool(described.problems) == shown
    assert ("What did not pass" in page(described)) == ("What did not pass" in markdown(described)) == shown
    noted = [note for note in described.notes if "not compared" in note]
    assert noted == ([] if shown else ["packed: gradients not compared: they are zero"])


@pytest.mark.parametrize(
    ("advantages", "flags", "expected"),
    [
        # The inputs that a cell replays; None: as they were. By hand: one of those compared has a signal.
        ([0, 0, 1], ["--max-inputs", "2"], ["--inputs", "2,0"]),
        ([0, 0, 1], ["--gradient-inputs", "1"], ["--gradient-inputs", "1", "--inputs", "2,0-1"]),
        ([0, 0, 1], ["--max-inputs", "1", "--loss", "cross-entropy"], None),
        ([0, 0, 1], ["--inputs", "0,1"], None),
        ([0, 0, 1], ["--steps", "0:2", "--max-inputs", "2"], None),
        ([0, 1, 0], ["--max-inputs", "2"], None),
        ([0, 0, 0], ["--max-inputs", "2"], None),
        ([0, 0, 1], [], None),
    ],
)
def test_a_matrix_takes_an_input_with_a_signal(
    advantages: list[int], flags: list[str], expected: list[str] | None
) -> None:
    inputs = [policy_batch(value) for value in advantages]
    recording = Inputs(inputs)
    found, notes = with_signal(recording, flags)  # type: ignore[arg-type]
    assert list(found) == (flags if expected is None else expected)
    assert bool(notes) == (expected is not None)


class Inputs(list[Any]):
    """What a matrix reads of a recording; input i is of step i."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__(SimpleNamespace(batch=batch) for batch in batches)
        self.metas = [SimpleNamespace(step=index) for index in range(len(batches))]


def policy_batch(advantage: float) -> PolicyBatch:
    """One document of three tokens, of which the last two are trained."""
    mask = torch.tensor([False, True, True])
    return PolicyBatch(
        token_ids=torch.tensor([1, 2, 3]),
        positions=torch.arange(3),
        cu_seqlens=torch.tensor([0, 3], dtype=torch.int32),
        max_seqlen=3,
        labels=torch.tensor([2, 3, 0]),
        loss_mask=mask,
        loss_weights=mask.float(),
        lengths=(3,),
        sample_ids=(0,),
        rollout_logprobs=torch.zeros(3),
        advantages=advantage * mask.float(),
    )


# end of 38
