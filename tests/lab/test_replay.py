from __future__ import annotations

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from safetensors.torch import load_file

import lockstep.train.local as local
import lockstep.train.loss_module as loss_module
from lockstep.errors import ConfigError, RecordingError
from lockstep.packing import Bucket
from lockstep.schema.recording import RecordedInput
from lockstep_lab.replay import run as lab_replay
from lockstep_lab.replay.cell import Cell, ReplayOptions
from lockstep_lab.replay.ranks import replay_simulated
from lockstep_lab.replay.replayer import Deadline, Replayer
from lockstep_lab.replay.results import ReplayFiles, ReplayRow
from lockstep_lab.replay.run import ReplayResult, replay

STATIC = Bucket(tokens=128, documents=8, max_seqlen=64)


def options(recording: Any, cell: dict[str, Any] | None = None, **others: Any) -> ReplayOptions:
    own = Cell.of_recording(recording.header, device="cpu")
    return ReplayOptions(cell=dataclasses.replace(own, **(cell or {})), **others)


def run(recording: Any, cell: dict[str, Any] | None = None, **others: Any) -> ReplayResult:
    return replay(recording, options(recording, cell, **others))


def losses(result: ReplayResult) -> list[float]:
    return [row.loss for row in result.rows if row.loss is not None]


# --- the same configuration -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "axes",
    [
        {},
        {"layout": "padded", "padding_side": "left"},
        {"attention": "varlen"},
        {"dtype": "bfloat16"},
        {"bucket": STATIC},
        {"activation_checkpointing": True},
        {"attention": "varlen", "batch_invariant": True, "dtype": "bfloat16"},
        pytest.param({"execution": "joint", "bucket": STATIC}, marks=pytest.mark.exhaustive),
        pytest.param({"execution": "compile", "bucket": STATIC}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"execution": "compile", "bucket": STATIC, "layout": "padded"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_the_same_configuration_gives_the_recording_to_the_bit(
    record: Callable[..., Any], axes: dict[str, Any]
) -> None:
    recording = record(**axes)
    result = run(recording)
    assert result.ok and len(result.rows) == 6
    for row in result.rows:
        assert (row.weights, row.loss_difference, row.logprob_max_difference) == ("match", 0.0, 0.0), row
        assert row.loss == row.loss_recorded and row.loss != 0.0
    # The second step saw other weights: without its checkpoint there would be a difference (next test).
    assert result.summary["weights"]["matches"] is True
    assert result.summary["verdict"] == "replay: 6 of 6 inputs replayed; equal to the recording, bit for bit"
    assert result.summary["compile"]["recompiles"] == 0


def test_weights_that_are_not_stored_are_a_mismatch_that_is_stated(recording: Any) -> None:
    late = [
        dataclasses.replace(r, meta=dataclasses.replace(r.meta, checkpoint=None, step=7))
        for r in recording.inputs
    ]
    result = run(dataclasses.replace(recording, inputs=late))
    assert result.ok
    assert [row.weights for row in result.rows] == ["match"] * 3 + ["mismatch"] * 3
    assert all(row.logprob_max_difference == 0.0 for row in result.rows[:3])
    assert all((row.logprob_max_difference or 0.0) > 1e-3 for row in result.rows[3:])
    assert result.summary["weights"]["matches"] is False
    assert "NOT the recorded weights for 3 inputs; the 3 others: equal to the" in result.summary["verdict"]
    assert result.summary["differences"]["on_recorded_weights"]["logprob_max"] == 0.0


def test_base_weights_come_back_after_a_checkpoint(recording: Any) -> None:
    first, late = recording.inputs[0], recording.inputs[3]
    bare = dataclasses.replace(first, meta=dataclasses.replace(first.meta, checkpoint=None, step=9))
    result = run(dataclasses.replace(recording, inputs=[late, bare, late]))
    assert [row.logprob_max_difference for row in result.rows] == [0.0, 0.0, 0.0]


def test_nobody_knows_the_weights_of_a_recording_without_fingerprints(recording: Any) -> None:
    unknown = [
        dataclasses.replace(r, meta=dataclasses.replace(r.meta, weights=None)) for r in recording.inputs
    ]
    result = run(dataclasses.replace(recording, inputs=unknown), max_inputs=1)
    assert result.rows[0].weights == "unknown" and result.summary["weights"]["matches"] is None
    assert "nobody knows" in result.summary["weights"]["statement"]


def test_another_dtype_replays_the_recorded_weights_converted(record: Callable[..., Any]) -> None:
    recording = record(dtype="bfloat16")
    result = run(recording, {"dtype": "float32"})
    assert {row.weights for row in result.rows} == {"match"}
    assert "converted to float32" in result.summary["weights"]["statement"]
    assert all(0.0 < (row.logprob_max_difference or 0.0) < 0.1 for row in result.rows)


def test_another_model_is_a_mismatch(recording: Any) -> None:
    result = run(recording, {"model": "shape:tiny-qwen3"}, max_inputs=1)
    assert result.rows[0].weights == "mismatch" and result.summary["model"]["name"] == "shape:tiny-qwen3"
    assert "NOT the recorded" in result.summary["weights"]["statement"]


# --- other cells ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [
        {"layout": "padded"},
        {"layout": "padded", "padding_side": "left"},
        {"attention": "varlen"},
        {"attention": "varlen", "layout": "padded"},
        {"attention": "hf:eager"},
        {"activation_checkpointing": True},
        pytest.param({"execution": "compile"}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        pytest.param({"execution": "compile", "layout": "padded"}, marks=pytest.mark.exhaustive),
        pytest.param({"execution": "compile", "attention": "varlen"}, marks=pytest.mark.exhaustive),
        pytest.param(
            {"execution": "compile", "attention": "varlen", "layout": "padded"},
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=str,
)
def test_every_cell_agrees_with_the_recording(recording: Any, cell: dict[str, Any], tmp_path: Path) -> None:
    gradients = []
    for each in ({}, cell):
        files = ReplayFiles(tmp_path / str(len(gradients)), echo=lambda _: None)
        result = replay(
            recording, options(recording, each, keep_outputs=True, gradient_inputs=2), files=files
        )
        files.close()
        gradients.append(load_file(files.out / "outputs.safetensors"))
    assert result.ok and {row.weights for row in result.rows} == {"match"}
    for row in result.rows:
        assert row.logprob_max_difference is not None and row.logprob_max_difference < 2e-4
        assert row.loss_difference is not None and abs(row.loss_difference) < 1e-5
    reference, found = gradients
    assert reference.keys() == found.keys() and len(reference) > 6 + 10
    for name, expected in reference.items():
        if name.startswith("gradients/"):
            assert float((found[name] - expected).norm()) <= 1e-5 * float(expected.norm()) + 1e-9, name
    if cell.get("execution") == "compile":
        compiled = result.summary["compile"]
        assert (compiled["recompiles"], compiled["graph_breaks"]) == (0, 0) and compiled["graphs"] > 0
        assert sum(row.first_call for row in result.rows) == compiled["shapes"]
        assert all(row.new_graphs == 0 for row in result.rows if not row.first_call)


def test_a_padded_cell_really_computes_b_times_l_rows(recording: Any) -> None:
    """Rows that the first linear of the first block sees, counted by a hook."""
    seen: list[int] = []
    for cell, expected in (({}, [47, 18, 43]), ({"layout": "padded"}, [3 * 30, 2 * 9, 2 * 40])):
        replayer = Replayer(recording, options(recording, cell))
        seen.clear()
        linear = replayer.policy.model.module.get_submodule("model.layers.0.self_attn.q_proj")
        linear.register_forward_hook(
            lambda module, inputs, output: seen.append(math.prod(inputs[0].shape[:-1]))
        )
        rows = [replayer.run(index) for index in (0, 1, 2)]
        assert seen == expected == [row.computed_slots for row in rows]
        assert [row.tokens for row in rows] == [47, 18, 43]


@pytest.mark.exhaustive
def test_compiled_cells_have_one_shape_per_bucket(recording: Any) -> None:
    packed = run(recording, {"execution": "compile"}, capacity=256)
    # quarters of 256 slots; every input fits the first, and pads may be 64 long
    assert {row.shape for row in packed.rows} == {(64, 5, 64)}
    dense = run(recording, {"execution": "compile", "layout": "padded"})
    # rows: 3 -> 4 and 2; all rows as long as the least, 64
    assert [row.computed_slots for row in dense.rows] == [256, 128, 128] * 2


def test_a_capacity_below_an_input_is_refused(recording: Any) -> None:
    with raises(ConfigError, "out-of-range: --capacity", input=0):
        run(recording, {"execution": "compile"}, capacity=40)


# --- options --------------------------------------------------------------------------------------------


def test_plain_losses_are_those_of_the_logprobs(recording: Any, tmp_path: Path) -> None:
    files = ReplayFiles(tmp_path / "out", echo=lambda _: None)
    result = replay(recording, options(recording, loss="logprob-sum", keep_outputs=True), files=files)
    logprobs = load_file(tmp_path / "out/outputs.safetensors")
    for row, mean in zip(result.rows, losses(run(recording, loss="cross-entropy")), strict=True):
        own = logprobs[f"logprobs/{row.index}"].double()
        assert row.loss == pytest.approx(-float(own.sum()), rel=1e-5)
        assert mean == pytest.approx(-float(own.mean()), rel=1e-5)
        assert row.loss_difference is None and row.logprob_max_difference == 0.0


def test_forward_only(recording: Any) -> None:
    result = run(recording, backward=False)
    assert result.ok
    for row in result.rows:
        assert row.backward_ms is None and row.grad_norm is None and row.forward_ms
        assert row.logprob_max_difference == 0.0 and abs(row.loss_difference or 0.0) < 1e-6


def test_optimizer_steps_move_the_weights(recording: Any) -> None:
    same = [recording.inputs[0]] * 3
    result = run(dataclasses.replace(recording, inputs=same), optimizer_step=True)
    differences = [row.logprob_max_difference or 0.0 for row in result.rows]
    assert differences[0] == 0.0 < differences[1] < differences[2]
    assert [row.weights for row in result.rows] == ["match", "mismatch", "mismatch"]
    assert "only the first input is comparable" in result.summary["verdict"]


def test_a_model_that_was_recorded_with_fewer_layers_is_like_with_like(recording: Any) -> None:
    header = dataclasses.replace(recording.header, model=dict(recording.header.model) | {"num_layers": 1})
    bare = [
        dataclasses.replace(r, meta=dataclasses.replace(r.meta, checkpoint=None, step=9))
        for r in recording.inputs[:1]
    ]
    result = run(dataclasses.replace(recording, header=header, inputs=bare))
    assert result.ok
    assert (result.summary["model"]["num_layers"], result.summary["model"]["num_layers_full"]) == (1, 2)
    assert "like with like" not in result.summary["verdict"]
    assert "NOT the recorded weights for 1 input)" in result.summary["verdict"]


def test_fewer_layers_are_another_model(recording: Any) -> None:
    whole, result = run(recording, max_inputs=3), run(recording, {"num_layers": 1}, max_inputs=3)
    assert result.ok and losses(whole) != losses(result)
    assert {row.weights for row in result.rows} == {"mismatch"}
    assert "nothing recorded is comparable" in result.summary["weights"]["statement"]
    assert "not like with like: 1 of 2 layers" in result.summary["verdict"]
    memory = result.summary["memory"]
    # attention with biases, the MLP, two norms; embeddings and head stay
    per_layer = memory["parameter_bytes_full"] - memory["parameter_bytes"]
    block = 2 * (64 * 64 + 64) + 2 * (64 * 32 + 32) + 3 * 64 * 160 + 2 * 64
    assert per_layer == 4 * block and whole.summary["memory"]["layer_reduction_factor"] == 1.0
    assert memory["layer_reduction_factor"] == memory["parameter_bytes"] / memory["parameter_bytes_full"] < 1


def test_fewer_layers_are_the_first_ones_of_the_checkpoint(recording: Any) -> None:
    replayer = Replayer(recording, options(recording, {"num_layers": 1}, inputs=(3,)))
    stored = load_file(recording.path / "weights/step-000001/model.safetensors")
    weight = dict(replayer.policy.model.module.named_parameters())["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(weight, stored["model.layers.0.mlp.up_proj.weight"])


def test_which_inputs(recording: Any) -> None:
    def order(**others: Any) -> tuple[int, ...]:
        return Replayer(recording, options(recording, **others)).order

    assert order() == (0, 1, 2, 3, 4, 5)
    assert order(max_inputs=2) == (0, 1) and order(inputs=(4, 1, 4)) == (4, 1)
    assert order(steps=(1, None)) == (3, 4, 5) and order(steps=(None, 1)) == (0, 1, 2)
    shuffled = order(shuffle=True, seed=1)
    assert sorted(shuffled) == list(range(6)) and shuffled == order(shuffle=True, seed=1)
    assert shuffled != order(shuffle=True, seed=2) and shuffled[:2] == order(
        shuffle=True, seed=1, max_inputs=2
    )
    for others, text in (
        ({"inputs": (6,)}, "out-of-range: --inputs, 6"),
        ({"steps": (5, 9)}, "nothing-left: --steps"),
    ):
        with raises(ConfigError, text):
            order(**others)
    with raises(ConfigError, "nothing-to-do: recording0"):
        run(dataclasses.replace(recording, inputs=[]))


def test_warm_up_is_not_counted(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = local.LocalBackend.forward_backward

    def counted(self: Any, batches: Any, loss: Any) -> Any:
        calls.append(batches[0].num_tokens)
        return real(self, batches, loss)

    monkeypatch.setattr(local.LocalBackend, "forward_backward", counted)
    result = run(recording, max_inputs=3, warmup=2)
    assert calls == [47, 18, 47, 18, 43] and len(result.rows) == 3
    assert result.summary["weights"]["inputs"]["match"] == 3


# --- failures -------------------------------------------------------------------------------------------


def break_input(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, tokens: int = 18) -> None:
    """The forward of batches with so many tokens raises."""
    real = loss_module.decoder_inputs

    def broken(module: Any, batch: Any, **layout: Any) -> Any:
        if batch.num_tokens == tokens:
            raise error
        return real(module, batch, **layout)

    monkeypatch.setattr(loss_module, "decoder_inputs", broken)


def test_one_failing_input_does_not_end_the_replay(
    recording: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    break_input(monkeypatch, ValueError("\n  kernel refused a row\nmore"))
    said: list[str] = []
    files = ReplayFiles(tmp_path / "out", echo=said.append)
    result = replay(recording, options(recording, max_inputs=3), files=files)
    files.close()
    assert [row.status for row in result.rows] == ["ok", "failed", "ok"] and not result.ok
    assert [row.logprob_max_difference for row in result.rows] == [0.0, None, 0.0]
    error = result.rows[1].error
    assert error == {"type": "ValueError", "line": "kernel refused a row", "log": "tracebacks/000001.txt"}
    trace = (tmp_path / "out/tracebacks/000001.txt").read_text()
    assert "Traceback" in trace and "in broken" in trace and "kernel refused a row" in trace
    assert result.summary["counts"].items() >= {"ok": 2, "failed": 1, "oom": 0, "inputs": 3}.items()
    assert result.summary["errors"] == {"ValueError": 1}
    assert "2 of 3 inputs replayed, 1 failed" in result.summary["verdict"]
    lines = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok", "failed", "ok"] and lines[1]["error"] == error
    assert {field.name for field in dataclasses.fields(ReplayRow)} == lines[0].keys()
    assert json.loads((tmp_path / "out/summary.json").read_text())["verdict"] == result.summary["verdict"]
    log = (tmp_path / "out/replay.log").read_text()
    assert "FAILED: ValueError: kernel refused a row" in log and "sdpa + eager + packed" in "\n".join(said)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_out_of_memory_is_a_status_of_its_own(
    recording: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    break_input(monkeypatch, error)
    result = run(recording, max_inputs=3)
    assert [row.status for row in result.rows] == ["ok", "oom", "ok"]
    row = result.rows[1]
    assert row.error is not None and "out of memory with" in row.error["line"]
    assert "1 out of memory" in result.summary["verdict"]


def test_a_broken_device_is_not_asked_again(recording: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_input(monkeypatch, RuntimeError("CUDA error: device-side assert triggered"))
    replayer = Replayer(recording, options(recording))
    replayer.device = torch.device("cuda")
    assert [replayer.run(index).status for index in (0, 1, 2)] == ["ok", "failed", "skipped"]


def test_ctrl_c_writes_what_there_is(recording: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    break_input(monkeypatch, KeyboardInterrupt(), tokens=43)
    files = ReplayFiles(tmp_path / "out", echo=lambda _: None)
    result = replay(recording, options(recording), files=files)
    assert result.interrupted and not result.ok and len(result.rows) == 2
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert (
        summary["interrupted"] and "interrupted, 4 not tried: this summary is partial" in summary["verdict"]
    )


def test_a_deadline_ends_the_process_with_everything_written(tmp_path: Path) -> None:
    files, ended, partial = ReplayFiles(tmp_path / "out", echo=lambda _: None), [], []
    with Deadline(0.05, files=files, on_expiry=partial.append, leave=ended.append) as deadline:
        deadline.start(3)
        time.sleep(0.01)
        deadline.stop()
        time.sleep(0.3)
        assert ended == []
        deadline.start(4)
        time.sleep(0.5)
    assert (partial, ended) == ([4], [1])
    assert "test_a_deadline" in (tmp_path / "out/tracebacks/000004.txt").read_text()


@pytest.mark.parametrize("call", [replay, replay_simulated])
def test_the_deadline_is_there_in_the_warm_up_too(
    recording: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Any
) -> None:
    real, calls, ended = Replayer.run, [], []

    def slow_at_first(self: Replayer, index: int) -> ReplayRow:
        calls.append(index)
        if len(calls) == 1:
            time.sleep(2.5)
        return real(self, index)

    monkeypatch.setattr(Replayer, "run", slow_at_first)
    monkeypatch.setattr(lab_replay, "Deadline", functools.partial(Deadline, leave=ended.append))
    files = ReplayFiles(tmp_path / "out", echo=lambda _: None)
    call(recording, options(recording, max_inputs=2, warmup=1, timeout=2.0), files=files)
    assert ended == [1] and calls[0] == 0 and len(calls) == 3
    assert "slow_at_first" in (tmp_path / "out/tracebacks/000000.txt").read_text()
    late = json.loads((tmp_path / "out/results.jsonl").read_text().splitlines()[0])
    assert (late["index"], late["error"]["type"]) == (0, "Timeout")


def edited(recorded: RecordedInput, **fields: Any) -> RecordedInput:
    return dataclasses.replace(recorded, batch=dataclasses.replace(recorded.batch, **fields))


def test_a_smaller_vocabulary_is_refused_before_any_weight_is_loaded(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lockstep_lab.replay.policy as policy

    monkeypatch.setattr(policy, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    ids = recording.inputs[1].batch.token_ids.clone()
    ids[4] = 300
    wide = dataclasses.replace(
        recording,
        header=dataclasses.replace(recording.header, vocab_size=1000),
        inputs=[recording.inputs[0], edited(recording.inputs[1], token_ids=ids)],
    )
    with raises(RecordingError, "outside-vocabulary: token_ids", input=1) as caught:
        run(wide)
    assert "a vocabulary of 256" in str(caught.value) and "--model" in str(caught.value)


def test_an_id_that_the_header_denies_fails_its_input_only(recording: Any) -> None:
    ids = recording.inputs[1].batch.token_ids.clone()
    ids[0] = -1
    inputs = [recording.inputs[0], edited(recording.inputs[1], token_ids=ids), recording.inputs[2]]
    result = run(dataclasses.replace(recording, inputs=inputs))
    assert [row.status for row in result.rows] == ["ok", "failed", "ok"]
    assert result.rows[1].error is not None and "it contains id -1" in result.rows[1].error["line"]


def test_fewer_positions_are_refused_before_any_weight_is_loaded(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lockstep_lab.replay.policy as policy
    from lockstep.models.shape_table import SHAPES

    monkeypatch.setitem(SHAPES, "tiny-short", SHAPES["tiny-llama"] | {"max_position_embeddings": 32})
    monkeypatch.setattr(policy, "load_model", lambda *_, **__: pytest.fail("weights were loaded"))
    with raises(RecordingError, "too-long: positions", input=2):
        run(recording, {"model": "shape:tiny-short"})


def test_a_recording_cannot_switch_remote_code_on(recording: Any) -> None:
    from lockstep_lab.replay.policy import model_config

    header = dataclasses.replace(
        recording.header, model={**recording.header.model, "trust_remote_code": True}
    )
    assert model_config(header, options(recording)).trust_remote_code is False
    assert model_config(header, options(recording, trust_remote_code=True)).trust_remote_code is True


def test_a_header_whose_model_is_none_names_the_field(recording: Any) -> None:
    bad = dataclasses.replace(recording, header=dataclasses.replace(recording.header, model={"name": 3}))
    with raises(RecordingError, "wrong-field: model.name"):
        run(bad)
    assert run(bad, {"model": "shape:tiny-llama"}, max_inputs=1).ok


def test_an_earlier_replay_is_not_overwritten(tmp_path: Path) -> None:
    files = ReplayFiles(tmp_path / "out", echo=lambda _: None)
    assert not files.out.exists()  # what is refused before the first line leaves nothing behind
    files.line("begun")
    files.close()
    with raises(ConfigError, "already-exists: --out, out"):
        ReplayFiles(tmp_path / "out")
    (tmp_path / "file").write_text("")
    with raises(ConfigError, "not-a-file: --out, file"):
        ReplayFiles(tmp_path / "file")


def test_control_characters_do_not_reach_the_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    files = ReplayFiles(tmp_path / "out", echo=said.append)
    files.line("weights of \x1b[2Jevil\u202e")
    assert said == ["weights of \\x1b[2Jevil\\u202e"]
