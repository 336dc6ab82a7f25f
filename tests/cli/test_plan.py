import json
from pathlib import Path

import pytest
import torch
from raising import raises

from lockstep.cli import plan
from lockstep.errors import ConfigError, ModelError
from lockstep.loop.memory_plan import plan_memory


def test_a_run_that_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    code = plan.main(["grpo", "--model.name", "shape:tiny-llama", "--memory-gib", "4", "--json", str(file)])
    out = capsys.readouterr().out
    assert code == 0
    assert out.splitlines()[-1].startswith("plan: fits, ")
    result = json.loads(file.read_text())
    assert result["fits"]
    assert result["available_bytes"] == 4 * 2**30
    # embeddings and head 2 * 256 * 64; per layer q and o 64 * 64, k and v 64 * 32, MLP 3 * 64 * 160, biases
    # 64 + 32 + 32 + 64, two norms; one last norm
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 192 + 128
    assert result["parameters"] == 2 * 256 * 64 + 2 * layer + 64
    assert "KV cache" in {part["name"] for part in result["parts"]}
    assert "at most 22 micro-batches of at most 3456 tokens" in out


def test_a_run_that_does_not_fit_names_the_part_and_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    code = plan.main(["sft", "--model.name", "shape:llama-3.1-8b", "--memory-gib", "40"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert code == 1
    assert last.startswith("plan: does not fit, ")
    assert "optimizer states (59.83 GiB)" in last
    assert "train.optimizer = 'adamw8bit'" in last


def test_a_run_of_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    argv = ["sft", "--model.name", "shape:llama-3.1-8b", "--model.dtype", "bfloat16", "--json", str(file)]
    argv += ["--memory-gib", "80", "--train.backend", "fsdp2", "--train.activation-checkpointing", "true"]
    assert plan.main([*argv, "--ranks", "2"]) == 1
    assert "--ranks" in capsys.readouterr().out.splitlines()[-1]
    assert plan.main([*argv, "--ranks", "8"]) == 0
    result = json.loads(file.read_text())
    assert result["ranks"] == 8
    sizes = {part["name"]: part["bytes"] for part in result["parts"]}
    assert sizes["optimizer states"] == 8_030_261_248
    with raises(ConfigError, "out-of-range: --ranks"):
        plan.main([*argv, "--ranks", "0"])
    with raises(ConfigError, "not-divisible: train.tp"):
        plan.main([*argv, "--ranks", "3", "--train.tp", "2"])
    with raises(ConfigError, "not-divisible: train.tp"):
        plan.main([*argv, "--ranks", "3", "--train.tp", "3"])


def test_the_advice_works() -> None:
    too_much = ["sft", "--model.name", "shape:tiny-llama", "--train.token-budget", "1000000"]
    too_much += ["--batch-size", "1000", "--memory-gib", "2"]
    assert plan.main(too_much) == 1
    assert plan.main([*too_much, "--train.token-budget", "4096"]) == 0


def test_a_file_and_a_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.toml"
    file.write_text("kind = 'sft'\nbatch_size = 7\n[model]\nname = 'shape:tiny-qwen3'\n")
    assert plan.main([str(file), "--data.max-length", "100"]) == 0
    assert "7 documents of at most 100 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run_that_is_not_there.toml"], "no-such-file: run_that_is_not_there.toml"),
        (["grpo", "--train.device", "cuda:7"], "missing-device: train.device"),
        (["sft", "--gpu", "NVIDIA H100"], "missing-setting: --gpu"),
        (
            ["sft", "--gpu", "NVIDIA H100", "--memory-gib", "9", "--train.device", "cpu"],
            "contradiction: --gpu",
        ),
        (["--json", "x"], "missing-setting"),
    ],
)
def test_wrong_settings(argv: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(ConfigError, message):
        plan.main(argv)


def test_the_hub_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(self: socket.socket, address: object) -> None:
        pytest.fail(f"connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    with raises(ModelError, "unreachable"):
        plan.main(["grpo", "--model.name", "nobody/nothing"])


def test_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["--help"]) == 0
    assert plan.main([]) == 2
    assert "lockstep plan RUN.toml" in capsys.readouterr().out


FOR_OTHER_GPUS = [
    "sft",
    "--model.name",
    "shape:llama-3.2-1b",
    "--model.dtype",
    "bfloat16",
    "--gpu",
    "NVIDIA H100",
]


def test_a_plan_for_gpus_elsewhere_has_its_neighbours_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*FOR_OTHER_GPUS, "--memory-gib", "24", "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    plans = result["plans"]
    assert [*plans] == ["chosen", "smaller", "faster"]
    sizes, seconds = ([plans[name][field] for name in plans] for field in ("peak_bytes", "seconds"))
    assert sizes[1] < sizes[0] == result["peak_bytes"] < 24 * 2**30 < sizes[2]
    assert seconds[1] > seconds[0] > seconds[2]
    lines = capsys.readouterr().out.splitlines()
    assert all(f"  {name}: {found['line']}" in lines for name, found in plans.items())


def test_where_no_plan_fits_the_refusal_is_the_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    assert plan.main([*FOR_OTHER_GPUS, "--memory-gib", "6", "--json", str(file)]) == 1
    result = json.loads(file.read_text())
    assert not result["fits"] and [*result["plans"]] == ["smallest"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"plan: does not fit: {result['refusal']}" and "What would fit: " in last
    nearly = result["peak_bytes"] * 1.01 / 2**30  # no plan may use that much of a GPU
    assert plan.main([*FOR_OTHER_GPUS, "--memory-gib", f"{nearly:.3f}", "--json", str(file)]) == 1
    assert not json.loads(file.read_text())["fits"]


def test_it_draws_the_models_that_a_rank_holds() -> None:
    example = Path(__file__).parents[2] / "examples" / "ppo_ray" / "run.toml"
    run, _ = plan.parse([str(example)])
    assert run.roles == ("policy", "ref", "reward_model", "value")


def test_it_draws_the_devices_of_any_number_of_ranks() -> None:
    run, _ = plan.parse([str(Path(__file__).parents[2] / "examples" / "ppo_ray" / "run.toml")])
    assert run.cluster is not None and run.cluster.ranks == 2
    assert plan._placed(run, 2, gpus=False) is run.cluster
    together = run.cluster.model_copy(update={"colocate": ()})
    assert plan._placed(run.model_copy(update={"cluster": together}), 3, gpus=False) is None
    placed = plan._placed(run, 3, gpus=True)
    assert placed is not None and placed.draw(run.roles) == [
        "node 0: [gpu 0: rank 0] [gpu 1: rank 1] [gpu 2: rank 2]  each: policy + ref",
        "  remote group 1: [gpu 0: beside rank 0] [gpu 1: beside rank 1] [gpu 2: beside rank 2]  "
        "each: value + reward_model",
    ]


PLACED = [
    *("ppo", "--model.name", "shape:tiny-llama", "--algorithm.kl.coef", "0.1", "--memory-gib", "4"),
    *("--cluster.colocate", '[["policy"], ["ref", "value"]]', "--cluster.dedicated-gpus", "true"),
]


def test_it_draws_gpus_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main([*PLACED, "--train.backend", "fsdp2", "--cluster.gpus", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == [
        "node 0: [gpu 0: rank 0] [gpu 1: rank 1]  each: policy",
        "  remote group 1: [gpu 2: beside rank 0] [gpu 3: beside rank 1]  each: ref + value",
    ]


def test_more_gpus_than_the_machine_has_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    here = [word for word in PLACED if word not in ("--memory-gib", "4")]
    with raises(ConfigError, "not-enough: cluster.dedicated_gpus, 4 GPUs, only 3 are visible"):
        plan.main([*here, "--train.backend", "fsdp2", "--ranks", "2"])


def test_a_plan_has_a_table_of_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = plan.parse([*PLACED, "--model.dtype", "bfloat16", "--value.name", "shape:llama-3.1-8b"])
    made = plan_memory(run, device=torch.device("cuda"))
    plan.show(made, available=2**40, source="here")
    out = capsys.readouterr().out
    assert out.count("memory on ") == 2 and "memory on the GPU of remote group 1" in out
    assert plan.as_dict(made, available=2**40)["fullest"] == "remote group 1"
    assert "of remote group 1" in plan.verdict(made, available=1)
