"""The script shows the difference that bisect reported, with nothing but torch."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from bisect_arms import arm_of, batch_of, leak, perturb, scale_gradient, shift_rope

from lockstep_lab.bisect.divergence import find_first_divergence
from lockstep_lab.bisect.repro import write_repro
from lockstep_lab.bisect.run import bisect

BATCH = batch_of([5, 12, 3])
PADDED = {"layout": "padded", "padding_side": "left"}


def made(tmp_path, capsys, a, b):
    """(finding, exit status, what the script printed)."""
    finding = bisect(a, b, [(0, BATCH)]).finding
    script = write_repro(finding, BATCH, tmp_path)
    capsys.readouterr()
    status = runpy.run_path(str(script), run_name="repro")["main"]()
    return finding, status, capsys.readouterr().out


def number(text, line):
    return float(re.search(rf"{line}.*max difference ([\d.e+-]+)", text)[1])


@pytest.mark.parametrize("model", ["shape:tiny-llama", "shape:tiny-gemma3"])
@pytest.mark.parametrize(
    "parameter",
    [
        "model.embed_tokens.weight",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ],
)
def test_a_weight_that_differs_is_reproduced_from_the_inputs(tmp_path, capsys, parameter, model):
    b = arm_of("b", model=model, attention="varlen", **PADDED)
    perturb(b, parameter, scale=1e-2)
    finding, status, text = made(tmp_path, capsys, arm_of("a", model=model), b)
    assert finding.first.key.path == parameter.removesuffix(".weight") and status == 1
    assert number(text, "computed here") == pytest.approx(finding.first.max_abs, rel=1e-4)
    assert "reproduced from the inputs of both sides" in text


def test_the_head_is_reproduced(tmp_path, capsys):
    b = arm_of("b")
    perturb(b, "lm_head.weight", scale=1e-2)
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert finding.first.key.path.startswith("lm_head") and status == 1
    assert number(text, "computed here") == pytest.approx(finding.first.max_abs, rel=1e-4)


@pytest.mark.parametrize("train", [{}, PADDED])
@pytest.mark.parametrize("model", ["shape:tiny-llama", "shape:tiny-qwen3"])
def test_a_wrong_rope_is_reproduced(tmp_path, capsys, model, train):
    b = arm_of("b", model=model, **train)
    shift_rope(b, 1, token=9)
    finding, status, text = made(tmp_path, capsys, arm_of("a", model=model), b)
    assert finding.first.key.tensor == "q" and status == 1
    assert number(text, "computed here") == pytest.approx(finding.first.max_abs, rel=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
@pytest.mark.parametrize("model", ["shape:tiny-llama", "shape:tiny-mistral"])
def test_a_mask_that_leaks_is_reproduced_by_the_kernels_formula(tmp_path, capsys, model, attention):
    b = arm_of("b", model=model, attention=attention)
    leak(b, 0)
    finding, status, text = made(tmp_path, capsys, arm_of("a", model=model, **PADDED), b)
    assert finding.first.kind.startswith("attention kernel") and status == 1
    assert number(text, "computed here") == pytest.approx(finding.first.max_abs, rel=1e-4)
    assert number(text, "a: recorded") < 1e-5 and number(text, "b: recorded") < 1e-5


def test_code_that_does_not_do_what_its_inputs_say_is_told_apart(tmp_path, capsys):
    """The fault is in no input: the side that differs from plain torch is named."""
    b = arm_of("b")
    b.module.model.layers[1].mlp.up_proj.register_forward_hook(lambda m, a, out: out * 1.01)
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert finding.first.key.path == "model.layers.1.mlp.up_proj" and status == 1
    assert "b's recorded result is not what torch makes of it" in text
    assert number(text, "b: recorded") == pytest.approx(finding.first.max_abs, rel=1e-4)


def test_a_nan_is_shown(tmp_path, capsys):
    b = arm_of("b")

    def hook(module, args, output):
        output[0, 4, 1] = torch.nan

    b.module.model.layers[1].mlp.act_fn.register_forward_hook(hook)
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert finding.first.key.path == "model.layers.1.mlp.act_fn" and status == 1
    assert "max difference inf: b's recorded result is not what torch makes of it" in text


def test_gradients_of_a_kernel_are_differentiated(tmp_path, capsys, monkeypatch):
    from transformers import AttentionInterface

    mapping = AttentionInterface._global_mapping
    b = arm_of("b", attention="varlen")
    inner = mapping["lockstep_varlen"]

    def kernel(module, query, key, value, mask, **kwargs):
        key = key.clone()
        key.register_hook(lambda g: g * 1.01)
        return inner(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(mapping, "lockstep_varlen", kernel)
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert finding.first.key.direction == "backward" and finding.first.key.tensor == "k" and status == 1
    assert number(text, "a: recorded") < 1e-6 < number(text, "b: recorded")
    assert "b's recorded result" in text


def test_the_gradient_of_a_weight_is_differentiated(tmp_path, capsys):
    b = arm_of("b")
    b.module.model.layers[1].mlp.down_proj.weight.register_hook(lambda g: g * 1.01)
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert finding.first.key.tensor == "parameter weight" and status == 1
    assert number(text, "a: recorded") < 1e-5
    assert number(text, "b: recorded") == pytest.approx(finding.first.max_abs, rel=1e-3)


def test_without_a_formula_the_recorded_tensors_are_compared(tmp_path, capsys):
    b = arm_of("b")
    scale_gradient(b, "model.layers.0.mlp.up_proj")
    finding, status, text = made(tmp_path, capsys, arm_of("a"), b)
    assert status == 1 and "there is no formula in plain torch" in text
    assert number(text, "recorded  ") == pytest.approx(finding.first.max_abs, rel=1e-4)


def test_what_is_not_there_is_not_reproduced(tmp_path, capsys):
    b = arm_of("b")
    perturb(b, "model.layers.0.mlp.down_proj.weight", scale=1e-2)
    finding = bisect(arm_of("a"), b, [(0, BATCH)]).finding
    script = write_repro(finding, BATCH, tmp_path)
    text = script.read_text(encoding="utf-8")
    script.write_text(text.replace('"reported": ', '"reported": 1e3, "old": '), encoding="utf-8")
    capsys.readouterr()
    assert runpy.run_path(str(script), run_name="repro")["main"]() == 0
    assert "not reproduced" in capsys.readouterr().out


def test_the_script_imports_neither_lockstep_nor_transformers(tmp_path):
    b = arm_of("b", attention="varlen")
    leak(b, 1)
    finding = bisect(arm_of("a"), b, [(0, BATCH)]).finding
    script = write_repro(finding, BATCH, tmp_path)
    blocked = "".join(f"sys.modules[{n!r}] = None; " for n in ("lockstep", "transformers", "safetensors"))
    code = f"import sys, runpy; {blocked}runpy.run_path({str(script)!r}, run_name='__main__')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 1, done.stderr
    assert number(done.stdout, "computed here") == pytest.approx(finding.first.max_abs, rel=1e-4)
    assert done.stdout.splitlines()[-1].endswith("reproduced from the inputs of both sides")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("model", "attention"),
    [
        ("shape:tiny-llama", "sdpa"),
        ("shape:tiny-llama", "varlen"),
        ("shape:tiny-gemma3", "varlen"),
        ("shape:tiny-mistral", "sdpa"),
    ],
)
def test_a_whole_layer_compiled_and_eager(tmp_path, capsys, model, attention):
    """Rope, GQA, biases, norms and windows of the inlined layer are the model's: it recomputes both sides."""
    torch._dynamo.reset()
    a = arm_of("a", model=model, attention=attention)
    b = arm_of("b", model=model, attention=attention, execution="compile")
    finding = find_first_divergence(a, b, BATCH, tolerance=1e-12)
    assert finding.first.kind.endswith("DecoderLayer")
    script = write_repro(finding, BATCH, tmp_path)
    capsys.readouterr()
    runpy.run_path(str(script), run_name="repro")["main"]()
    text = capsys.readouterr().out
    assert number(text, "a: recorded") < 2e-6 and number(text, "b: recorded") < 5e-6
