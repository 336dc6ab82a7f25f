"""`lockstep parity engines` with a real vLLM, in the worker's process and as a server of its own."""

import json
import sys
from pathlib import Path

import pytest
import torch

from lockstep.models.shapes import random_model, shape_config
from lockstep_lab.cli.parity_engines import main


@pytest.mark.slow
def test_hf_and_both_kinds_of_vllm_agree(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = shape_config("tiny-llama")
    config.head_dim = 32  # vLLM's attention on a CPU has none of 16
    model = random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    model.save_pretrained(tmp_path / "model")
    flags = ["--engines", "hf,vllm,server=vllm", "--python", f"server={sys.executable}", "--data", "ids"]
    flags += ["--model", str(tmp_path / "model"), "--max-prompts", "4", "--device", "cpu"]
    status = main([*flags, "--out", str(tmp_path / "out"), "--timeout", "500"])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert "3 of 3 engines agree" in printed.splitlines()[-1]
    found = json.loads((tmp_path / "out/engines.json").read_text())
    for engine in found["engines"][1:]:
        for phase in ("before", "after"):
            told = engine["phases"][phase]
            assert told["gap"]["max"] < 1e-4 and told["gap_long"]["tokens"] > 0
            assert told["greedy"]["equal"] == told["greedy"]["prompts"] == 4
            assert told["again"]["equal"] == told["again"]["pairs"] == 16
        # the prefix cache was used, so a stale one would have shown
        assert engine["phases"]["after"]["cache_hit_rate"] > 0.3
