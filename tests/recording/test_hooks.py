"""`lockstep.record` on a plain Hugging Face loop: nothing changes, the surrogate has its gradients."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign_parts import gradient_error, recomputed
from raising import raises
from selected import exhaustive
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lockstep
from lockstep.algorithms.offline import SFTLoss
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import RecordingError
from lockstep.models.load import load_model
from lockstep.ops.losses import ppo_clip
from lockstep.recording import Recording
from lockstep.recording.calls import foreign_call
from lockstep.train.local import LocalBackend


def model() -> nn.Module:
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    return load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module


def batch(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :2] = 0
    return ids, mask


def policy_loss(module: nn.Module, ids: Tensor, mask: Tensor, *, entropy: float = 0.0) -> Tensor:
    logits = module(input_ids=ids, attention_mask=mask, logits_to_keep=5).logits[:, :-1] / 0.7
    logps = logits.log_softmax(-1)
    chosen = logps.gather(2, ids[:, -4:, None])[..., 0]
    advantages = torch.tensor([[1.0], [-0.5], [2.0]])
    ratio = torch.exp(chosen - chosen.detach() + 0.1)
    value = ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.2).mean()
    return value + entropy * (logps.exp() * logps).sum(-1).mean()


def train(directory: Path | None, *, entropy: float = 0.0) -> list[tuple[float, list[Tensor]]]:
    module = model().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    handle = None if directory is None else lockstep.record(module, directory, temperature=0.7)
    seen = []
    for step in range(2):
        for micro_batch in range(2):
            loss = policy_loss(module, *batch(2 * step + micro_batch), entropy=entropy)
            loss.backward()
            with torch.no_grad():
                module(input_ids=batch(0)[0])
        seen.append((float(loss.detach()), [p.grad.clone() for p in module.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return seen


def test_the_run_is_the_same_to_the_bit_and_the_surrogate_has_its_gradients(tmp_path: Path) -> None:
    plain, recorded = train(None), train(tmp_path / "r")
    for (loss, gradients), (other, others) in zip(plain, recorded, strict=True):
        assert loss == other
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    recording = Recording.open(tmp_path / "r")
    assert [tuple(meta.key) for meta in recording.metas] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert {meta.num_micro_batches for meta in recording.metas} == {2}
    assert recording.lengths[0] == (5, 9, 7)
    assert recording.header.axes["padding_side"] == "left"
    loaded = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32"), attention="sdpa", device=torch.device("cpu")
    )
    config = TrainConfig(attention="sdpa", device="cpu", grad_accum_dtype="float32")
    backend = LocalBackend(config, model=loaded, total_steps=1, temperature=0.7)
    inputs = [recording[0], recording[1]]
    stats = backend.forward_backward([one.batch for one in inputs], SFTLoss())
    for one, logprobs in zip(inputs, stats.logprobs, strict=True):
        assert one.outputs is not None and one.outputs.logprobs is not None
        torch.testing.assert_close(one.outputs.logprobs, logprobs, rtol=0, atol=1e-5)
    names = [name for name, _ in loaded.module.named_parameters()]
    own = torch.cat([backend.gradients()[name].flatten() for name in names])
    foreign = torch.cat([g.flatten() for g in plain[0][1]])
    assert float((own - foreign).norm() / foreign.norm()) < 1e-5


@pytest.mark.parametrize(("entropy", "low", "high"), [(0.0, 0.0, 1e-5), (0.1, 1e-2, 1.0)])
def test_the_residual_tells_an_entropy_bonus(tmp_path: Path, entropy: float, low: float, high: float) -> None:
    train(tmp_path / "r", entropy=entropy)
    for meta in Recording.open(tmp_path / "r").metas:
        assert low <= meta.documents[0]["call"]["relative_residual"] < high


# --- what is recorded -----------------------------------------------------------------------------------


def one_step(module: nn.Module, *arguments: Any, temperature: float = 1.0, **named: Any) -> list[Tensor]:
    """Forward, a sum of next tokens' logprobs over [B, L - 1], backward, SGD. Returns the gradients."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    logits = module(*arguments, **named).logits[:, :-1] / temperature
    ids = named["input_ids"] if "input_ids" in named else arguments[0]
    chosen = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    mask = named.get("attention_mask", torch.ones_like(ids))
    mask = (mask[:, 1:] * mask[:, :-1]).bool()  # a pad predicts nothing
    if (positions := named.get("position_ids")) is not None:
        mask = mask & (positions[:, 1:] != 0)
    (chosen * mask).sum().neg().backward()
    gradients = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    return gradients


def test_positions_that_start_again_are_documents(tmp_path: Path) -> None:
    """A packed row, as the model itself understands it: logprobs and gradients of Lockstep are the same."""
    ids = torch.randint(3, 256, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]])
    module = model().train()
    with lockstep.record(module, tmp_path / "r"):
        gradients = one_step(module, input_ids=ids, position_ids=positions, use_cache=False)
    recording = Recording.open(tmp_path / "r")
    assert recording.lengths == ((5, 3, 4),)
    assert recording.header.axes["layout"] == "packed"
    assert not recording[0].extras  # the batch says it all
    backend = recomputed(recording, [recording[0]], name="shape:tiny-llama")
    names = [name for name, _ in module.named_parameters()]
    assert gradient_error(backend.gradients(), dict(zip(names, gradients, strict=True))) < 1e-5


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
def test_cumulative_lengths_are_documents(tmp_path: Path, name: str) -> None:
    class Kernel(nn.Module):
        """Takes packed rows as varlen kernels do; what it computes is of no interest."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(32, 32)

        def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
            logits: Tensor = self.table(input_ids)
            return logits

    module = Kernel()
    ids = torch.arange(3, 15)[None]
    with lockstep.record(module, tmp_path / "r", step="manual") as handle:
        logits = module(ids, **{name: torch.tensor([0, 4, 9, 12], dtype=torch.int32)}, max_seqlen=5)
        logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).sum().backward()
        handle.step()
    recording = Recording.open(tmp_path / "r")
    assert recording.lengths == ((4, 5, 3),)
    one = recording[0]
    assert one.meta.documents[0]["call"]["arguments"] == {"max_seqlen": 5}
    # the loss also asks for each document's first token, of which no logprob is recorded
    assert one.meta.documents[0]["call"]["relative_residual"] > 0.1
    trained = torch.tensor([1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0]).bool()
    assert torch.equal(one.batch.loss_mask, trained)
    assert torch.allclose(one.batch.loss_weights[trained], torch.tensor(-1.0))
    with lockstep.record(module, tmp_path / "bad"):
        module(ids, cu_seqlens=torch.tensor([0, 4, 40]))
    (meta,) = Recording.open(tmp_path / "bad").metas
    assert "'cu_seqlens' [0, 4, 40] is not a list" in str(meta.unusable)


@pytest.mark.parametrize(
    ("real", "bounds", "lengths", "starts"),
    [
        # the second document has its pads in front, so that its first slot is none of the real ones
        ([1, 1, 1, 0, 0, 1, 1, 1], [0, 4, 8], (3, 3), ((0, 0), (0, 5))),
        # nothing is left of the middle one
        ([1, 1, 0, 0, 1, 1, 1, 1], [0, 2, 4, 8], (2, 4), ((0, 0), (0, 4))),
        ([0, 1, 1, 1, 0, 1, 0, 1], [0, 4, 6, 8], (3, 1, 1), ((0, 1), (0, 5), (0, 7))),
        # the same documents, counted without the pads
        ([1, 1, 1, 0, 0, 1, 1, 1], [0, 3, 6], (3, 3), ((0, 0), (0, 5))),
    ],
)
def test_a_document_whose_first_slot_is_masked_is_not_part_of_the_one_before(
    real: list[int], bounds: list[int], lengths: tuple[int, ...], starts: tuple[tuple[int, int], ...]
) -> None:
    ids = torch.arange(3, 11)[None]
    given = {"attention_mask": torch.tensor([real]), "cu_seqlens": torch.tensor(bounds, dtype=torch.int32)}
    call = foreign_call({"input_ids": ids, **given})
    assert (call.layout.lengths, call.layout.starts) == (lengths, starts)
    # lengths over all slots cannot be told from the real tokens: they are kept
    assert ("cu_seqlens" in call.extras) == (bounds[-1] == len(real))


def test_the_whole_gradient_of_the_logits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, (ids, mask) = model().train(), batch(0)
    with lockstep.record(module, tmp_path / "r", output_grad=True):
        one_step(module, input_ids=ids, attention_mask=mask)
    printed = capsys.readouterr().err
    assert printed.count("output_grad=True keeps") == 1 and "[3, 9, 256] torch.float32, 0.0 MiB" in printed
    kept = Recording.open(tmp_path / "r")[0].extras["grad.logits"]
    fresh = model().train()
    logits = fresh(input_ids=ids, attention_mask=mask).logits
    logits.retain_grad()
    chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    (chosen * mask[:, 1:] * mask[:, :-1]).sum().neg().backward()
    torch.testing.assert_close(kept, logits.grad, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "updates"),
    [
        ({"every": 2}, [0, 2, 4]),
        ({"first_call": 3}, [3, 4, 5]),
        ({"first_call": 1, "last_call": 4, "every": 2}, [1, 3]),
        ({"last_call": 0}, [0]),
    ],
)
def test_some_of_the_forwards(tmp_path: Path, options: dict[str, int], updates: list[int]) -> None:
    module = model().train()
    with lockstep.record(module, tmp_path / "r", **options):
        for step in range(6):
            one_step(module, input_ids=batch(step)[0])
    recording = Recording.open(tmp_path / "r")
    assert [meta.update for meta in recording.metas] == updates
    for update, one in zip(updates, recording, strict=True):
        assert one.batch.token_ids.tolist() == batch(update)[0].flatten().tolist()
    assert recording.header.notes["calls"] == 6
    assert recording.header.notes["selection"]["every"] == options.get("every", 1)


def test_forwards_without_a_graph(tmp_path: Path) -> None:
    module, (ids, mask) = model().train(), batch(0)
    with lockstep.record(module, tmp_path / "r", forwards="all"):
        with torch.inference_mode():
            module(input_ids=ids, attention_mask=mask)
        one_step(module, input_ids=ids, attention_mask=mask)
        with torch.no_grad():
            module.generate(ids, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    recording = Recording.open(tmp_path / "r")
    assert [meta.documents[0]["call"]["graph"] for meta in recording.metas] == [False, True, False]
    assert recording.header.notes["skipped_forwards"] == {"decoding with a cache": 2}
    scored, trained = recording[0], recording[1]
    assert scored.outputs is not None and trained.outputs is not None
    assert torch.equal(scored.outputs.logprobs, trained.outputs.logprobs)
    assert not scored.batch.loss_weights.any() and trained.batch.loss_weights.any()


# --- what goes wrong ------------------------------------------------------------------------------------


def test_a_forward_that_fails_is_there(tmp_path: Path) -> None:
    module, (ids, mask) = model().train(), batch(0)

    def broken(*_: Any) -> None:
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError), lockstep.record(module, tmp_path / "r"):
        one_step(module, input_ids=ids, attention_mask=mask)
        handle = module.model.layers[1].register_forward_hook(broken)
        with pytest.raises(ArithmeticError):
            one_step(module, input_ids=ids)  # the program goes on with another input
        handle.remove()
        one_step(module, input_ids=batch(1)[0])
        module.model.layers[1].register_full_backward_hook(broken)
        one_step(module, input_ids=batch(2)[0])
    recording = Recording.open(tmp_path / "r")
    assert [(m.update, m.micro_batch, m.outcome, m.error) for m in recording.metas] == [
        (0, 0, "finished", None),
        (1, 0, "failed", "ArithmeticError: on purpose"),
        (1, 1, "finished", None),
        (2, 0, "failed", "ArithmeticError: on purpose"),
    ]
    assert recording[1].batch.token_ids.tolist() == ids.flatten().tolist()
    assert recording[3].outputs is not None and recording[3].outputs.logprobs is not None


SCRIPT = """
import sys, torch, lockstep
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2)
module = LlamaForCausalLM(config)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
lockstep.record(module, sys.argv[1])
ids = torch.arange(5)[None]
module(input_ids=ids, labels=ids).loss.backward()
optimizer.step()
module(input_ids=ids + 1, labels=ids + 1)
if sys.argv[2] == "raise":
    raise ArithmeticError("on purpose")
"""


@pytest.mark.slow
@pytest.mark.parametrize("end", ["return", "raise"])
def test_a_program_that_ends_closes_its_recording(tmp_path: Path, end: str) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "r"), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (end == "raise"), done.stderr
    recording = Recording.open(tmp_path / "r")
    assert recording.closed
    assert recording.header.model["name"] == str(tmp_path / "r" / "weights" / "step-000000")
    last = recording.metas[1]
    wanted = ("failed", "ArithmeticError: on purpose") if end == "raise" else ("finished", None)
    assert (last.outcome, last.error) == wanted
    recomputed(recording, [recording[0]])  # on the stored weights alone: the model has no name


class Holder(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, **named: Any) -> Any:
        return self.policy(**named)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    exhaustive(
        ("module", "in place", "fullgraph", "layers", "inside", "before"),
        quick=("module", "fullgraph", "before"),
    ),
)
def test_compiled(tmp_path: Path, how: str) -> None:
    """Nothing but dynamo (backend "eager"): what is in question is whose hooks run when."""
    torch._dynamo.reset()
    module, (ids, mask) = model().train(), batch(0)
    plain = one_step(model().train(), input_ids=ids, attention_mask=mask)
    called: Any = module
    if how in ("module", "before"):
        called = torch.compile(module, backend="eager")
    elif how == "in place":
        module.compile(backend="eager")
    elif how == "inside":  # the policy's own call is traced then
        called = torch.compile(Holder(module), backend="eager", fullgraph=True)
        called(input_ids=ids, attention_mask=mask)
    elif how == "fullgraph":
        called = torch.compile(module, backend="eager", fullgraph=True)
    else:
        for layer in module.model.layers:
            layer.compile(backend="eager")
    if how == "before":  # what is compiled already
        called(input_ids=ids, attention_mask=mask)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    with lockstep.record(called, tmp_path / "r"):
        gradients = one_step(called, input_ids=ids, attention_mask=mask)
        assert any(not torch.equal(value, state[name]) for name, value in module.state_dict().items())
    called(input_ids=ids, attention_mask=mask)  # no longer recorded
    recording = Recording.open(tmp_path / "r")
    assert len(recording) == 1 and recording.header.axes["execution"] == "compile"
    torch.testing.assert_close(gradients, plain, rtol=0, atol=1e-4)
    backend = recomputed(recording, [recording[0]], name="shape:tiny-llama")
    names = [name for name, _ in module.named_parameters()]
    assert gradient_error(backend.gradients(), dict(zip(names, gradients, strict=True))) < 1e-5


def test_logits_that_are_divided_in_place(tmp_path: Path) -> None:
    """logits.div_(T), as TRL did and verl does: dL/dlogprob is of the logits as the model made them."""
    found = []
    for in_place in (False, True):
        module, (ids, mask) = model().train(), batch(0)
        directory = tmp_path / f"r{in_place}"
        with lockstep.record(module, directory, temperature=0.7, step="manual") as handle:
            logits = module(input_ids=ids, attention_mask=mask).logits
            logits = logits.div_(0.7) if in_place else logits / 0.7
            chosen = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
            (chosen * mask[:, 1:] * mask[:, :-1]).sum().neg().backward()
            handle.step()
        found.append(Recording.open(directory)[0])
    plain, other = found
    torch.testing.assert_close(other.batch.loss_weights, plain.batch.loss_weights, rtol=0, atol=1e-5)
    assert torch.equal(other.outputs.logprobs, plain.outputs.logprobs)
    assert other.meta.documents[0]["call"]["relative_residual"] < 1e-5
    assert float(plain.batch.loss_weights[plain.batch.loss_mask].mean()) == pytest.approx(1.0, abs=1e-4)


def test_a_wrong_temperature_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for temperature in (0.7, 1.0):
        module, (ids, mask) = model().train(), batch(0)
        with lockstep.record(module, tmp_path / f"r{temperature}", temperature=temperature):
            one_step(module, input_ids=ids, attention_mask=mask, temperature=0.7)
        told = capsys.readouterr().err
        residual = Recording.open(tmp_path / f"r{temperature}").header.notes["largest_relative_residual"]
        if temperature == 0.7:
            assert residual < 1e-5 and "unexplained" not in told
        else:
            assert residual > 0.02 and "does not divide logits by temperature=1.0" in told


def test_nothing_seen_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = model().train()
    with lockstep.record(module, tmp_path / "r"), torch.no_grad():
        module(input_ids=batch(0)[0])
    assert "recorded no forward of LlamaForCausalLM (other forwards: 1 no graph)" in capsys.readouterr().err
    assert not (tmp_path / "r" / "recording.json").exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"ranks": [1]}, "out-of-range: ranks"),
        ({"every": 0}, "out-of-range: every"),
        ({"temperature": 0.0}, "out-of-range: temperature"),
        ({"step": "never"}, "out-of-range: step"),
        ({"evry": 2}, "unknown-setting: evry"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, Any], named: str) -> None:
    with raises(RecordingError, named):
        lockstep.record(model(), tmp_path / "r", **options)
    assert not (tmp_path / "r").exists()


def test_a_rank_that_does_not_record(tmp_path: Path) -> None:
    module = model().train()
    for rank in (0, 1):
        options = {"rank": rank, "world_size": 2, "ranks": [1]}
        with lockstep.record(module, tmp_path / "r", **options):
            one_step(module, input_ids=batch(rank)[0])
        assert (tmp_path / "r").exists() == (rank == 1)
    recording = Recording.open(tmp_path / "r")
    assert (recording.ranks, [meta.rank for meta in recording.metas]) == ((1,), [1])


@pytest.mark.filterwarnings("error::FutureWarning")
def test_no_warning_of_transformers(tmp_path: Path) -> None:
    module = model().train()
    with lockstep.record(module, tmp_path / "r"):
        one_step(module, input_ids=batch(0)[0])
    assert Recording.open(tmp_path / "r").header.axes["activation_checkpointing"] is False


def test_a_forward_that_checkpointing_repeats_is_one_input(tmp_path: Path) -> None:
    module, (ids, _) = model().train(), batch(0)
    with lockstep.record(module, tmp_path / "r", step="manual") as handle:
        logits = checkpoint(lambda given: module(input_ids=given).logits, ids, use_reentrant=False)
        logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).sum().neg().backward()
        handle.step()
    recording = Recording.open(tmp_path / "r")
    assert [tuple(meta.key) for meta in recording.metas] == [(0, 0, 0)]
    weights = recording[0].batch.loss_weights[recording[0].batch.loss_mask]
    torch.testing.assert_close(weights, torch.ones(24), rtol=0, atol=1e-5)
