"""The self-test catches a twin of every op whose bits depend on the number of rows; verdicts are kept."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from invariant_models import tiny
from raising import raises

from lockstep import invariant
from lockstep.errors import ModelError
from lockstep.invariant import row_ops, selftest
from lockstep.invariant import row_ops as linear_ops
from lockstep.invariant.selftest import dependence


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lockstep"


def halves(x):
    """The last dimension's sum in one order or another, by the number of rows."""
    if x.shape[0] % 2:
        return x.sum(-1)
    middle = x.shape[-1] // 3
    return x[:, :middle].sum(-1) + x[:, middle:].sum(-1)


def norm_twin(x, weight, eps, unit_offset, rounded_last=False):
    wide = x.float()
    return wide * torch.rsqrt(halves(wide * wide)[:, None] / x.shape[-1] + eps) * (weight + unit_offset)


def linear_twin(x, weight, bias, tiles, exact_backward=False):
    """The columns' sums split in two, as split-K does, for few rows."""
    if x.shape[0] > 3:
        return F.linear(x, weight, bias)
    half = weight.shape[1] // 2
    return F.linear(x[:, :half], weight[:, :half], bias) + F.linear(x[:, half:], weight[:, half:])


def stats_twin(logits, labels, scale, cap):
    e = (logits.float() * scale).exp()
    total = halves(e)
    return logits.gather(1, labels[:, None])[:, 0] - total.log(), total, total.log()


def rotary_twin(positions, inv_freq, scaling, layout="halves"):
    """Angles from the first row's, as a recurrence would have them."""
    angles = (positions - positions[:1])[:, None] * inv_freq + positions[:1, None] * inv_freq
    return angles.cos(), angles.sin()


def mass_twin(logits, scale, cap, block):
    blocks = (logits.float() * scale).exp().view(logits.shape[0], -1, block)
    return torch.stack([halves(blocks[:, i]) for i in range(blocks.shape[1])], 1).log()


TWINS = [
    (linear_ops, "linear", linear_twin, "linear 64x64 with bias"),
    (row_ops, "rms_norm", norm_twin, "rms_norm "),
    (row_ops, "silu_and_mul", lambda gate, up: F.silu(gate) * up, "silu_and_mul 150"),
    (row_ops, "token_stats", stats_twin, "token_stats 256"),
    (row_ops, "block_mass", mass_twin, "block_mass 256"),
    (row_ops, "rotary", rotary_twin, "rotary "),
]


@pytest.mark.parametrize(("place", "name", "twin", "message"), TWINS, ids=[twin[1] for twin in TWINS])
def test_a_twin_is_caught(place, name, twin, message, monkeypatch):
    monkeypatch.setattr(place, name, twin)
    # 150 is no multiple of a vector: the ordinary silu differs in the last elements.
    with raises(ModelError, "not-batch-invariant") as caught:
        invariant.convert(tiny("llama", torch.float32, intermediate_size=150))
    assert message in str(caught.value)


def test_a_twin_of_gelu_is_caught(monkeypatch):
    monkeypatch.setattr(row_ops, "gelu_and_mul", lambda gate, up: F.gelu(gate, approximate="tanh") * up)
    with raises(ModelError, "not-batch-invariant: gelu_tanh_and_mul 150"):
        invariant.convert(tiny("gemma3_text", torch.float32, intermediate_size=150))


def test_twins_of_mean_and_bmm_are_caught():
    """No supported architecture uses them, so no self-test meets them."""
    x = torch.randn(251, 96, generator=torch.Generator().manual_seed(0))
    y = torch.randn(96, 40, generator=torch.Generator().manual_seed(1))
    assert dependence(lambda x: halves(x) / 96, x) is not None
    assert dependence(lambda x: torch.bmm(x[None], y[None])[0], x) is not None


def test_tiles_that_disagree_are_not_used(monkeypatch):
    """A product of one row, a matrix-vector product, adds in another order than that of 16."""
    monkeypatch.setattr(linear_ops, "TILES", (16, 1))
    module = tiny("llama", torch.float32, hidden_size=576)
    verdicts = invariant.convert(module).verdicts
    assert verdicts["linear 160x576 with bias"].choice == "tiles 16"
    assert module.model.layers[0].mlp.up_proj.tiles == (16,)


def test_a_tile_that_fails_is_rejected_for_the_next(monkeypatch):
    real = linear_ops.linear

    def only_single_tiles(x, weight, bias, tiles, exact_backward=False):
        return (real if len(tiles) == 1 else linear_twin)(x, weight, bias, tiles)

    monkeypatch.setattr(linear_ops, "linear", only_single_tiles)
    module = tiny("llama", torch.float32)
    verdict = invariant.convert(module).verdicts["linear 256x64"]
    assert verdict.choice == "tiles 16"
    # Which tiles are tried first depends on the CPU; they are several.
    assert re.match(r"tiles( \d+){2,} \(the first 1 of 251 rows alone: ", verdict.rejected[0])
    assert module.lm_head.tiles == (16,)


def test_verdicts_are_kept(cache, monkeypatch):
    module = tiny("llama", torch.float32)
    first = invariant.convert(module).verdicts
    (file,) = cache.iterdir()
    assert set(json.loads(file.read_text())) == set(first)

    def never(case, device):
        raise AssertionError(f"{case.name} was tested again")

    monkeypatch.setattr(selftest, "_verdict", never)
    assert invariant.self_test(module) == first
    with pytest.raises(AssertionError, match="tested again"):
        invariant.self_test(module, cache=False)
    with pytest.raises(AssertionError, match="tested again"):
        invariant.self_test(module, dtype=torch.bfloat16)  # another dtype is another file


def test_what_verdicts_are_kept_by(monkeypatch):
    def file():
        return selftest.cache_file(torch.device("cpu"), torch.float32)

    first = file()
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert file().name != first.name
    monkeypatch.undo()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 63)
    assert file().name != first.name


def test_a_damaged_cache_is_tested_again(cache, caplog):
    module = tiny("llama", torch.float32)
    first = invariant.convert(module).verdicts
    (file,) = cache.iterdir()
    untested = '{"linear 256x64": {"choice": "tiles 7", "rejected": []}}'
    for text in ("{", "[1]", '{"linear 256x64": {}}', untested, untested.replace("tiles 7", "tiles-junk")):
        file.write_text(text)
        caplog.clear()
        assert invariant.self_test(module) == first
        assert "cannot be read" in caplog.text
        assert set(json.loads(file.read_text())) == set(first)


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert invariant.convert(tiny("llama", torch.float32)).verdicts
    assert "not kept" in caplog.text
