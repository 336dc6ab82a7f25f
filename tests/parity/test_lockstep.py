"""Trainer and generator take the same step: a token's logprob has the same bits on both sides.

The chain: rollouts by engine `native` (chunked prefill, a shared prompt, preemption, decode in batches of any
make-up) = a forward over all samples in packs = the forward that is trained on, in 20 GRPO steps that change
the weights, compiled by inductor on both sides.
"""

import pytest
import torch
import torch.nn.functional as F
from lockstep_runs import build, config, train
from raising import raises
from selected import exhaustive
from starting import succeeds

from lockstep.attention import varlen
from lockstep.errors import TrainError
from lockstep.execution import is_compiled
from lockstep.invariant import modules, row_ops
from lockstep.observe.run_history import read_lines

MODELS = [
    ("tiny-llama", "float32"),
    ("tiny-qwen3", "bfloat16"),
    ("tiny-gemma3", "float32"),
    ("tiny-qwen3-moe", "float32"),
    ("tiny-qwen2-moe", "bfloat16"),
]
"""Biases; norms of queries and keys; a sliding window, other norms and another activation; experts; a shared
one beside them. All weights are random, those of norms and biases too."""


MORE = [f"tiny-{name}" for name in ("glm", "glm4", "seed-oss", "olmo2", "olmo3", "helium", "cohere")]
FSDP2 = ("--train.backend", "fsdp2")
EP = ("--train.ep", "2")
ROUTERS = ("--train.router-aux-loss", "0.01", "--train.route-changes-every", "2")
DDP = ("--train.backend", "deepspeed", "--train.zero-stage", "0")


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_lockstep(steps):
    hashes = [step.weights for step in steps]
    assert len(set(hashes)) == len(hashes), "a step left the weights as they were"
    for number, step in enumerate(steps):
        first, *later = step.gaps
        assert step.metrics["grad_norm"] > 0
        assert step.recomputed.numel() == sum(step.lengths) > first.numel() > 0
        for gap in (step.recomputed, first):
            differ = int(gap.count_nonzero())
            assert differ == 0, f"step {number}: {differ} of {gap.numel()} differ, max {gap.abs().max():.2e}"
        assert step.ratios[0].eq(1.0).all()
        # the next update is trained on other weights than those that sampled: that is how a gap looks
        assert all(gap.count_nonzero() > gap.numel() // 2 for gap in later) and later
        assert all(ratio.ne(1.0).any() for ratio in step.ratios[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "dtype"), exhaustive(MODELS, quick=MODELS[1:2]))
def test_twenty_compiled_steps_without_a_gap(model, dtype):
    parts = build(config(model, dtype, "compile"))
    steps = train(parts, steps=20)
    assert is_compiled(parts.model.module)
    counts, stats = parts.engine.counts, parts.engine.stats()
    parts.close()
    assert_lockstep(steps)
    assert all(step.metrics["old_logprobs_reused"] == 1.0 for step in steps)
    assert counts.preemptions >= 1 and stats.cached_tokens > 0
    assert len({length for step in steps for length in step.lengths}) > 3


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", ["tiny-qwen3-moe", "tiny-gpt-oss", pytest.param("tiny-mixtral", marks=pytest.mark.exhaustive)]
)
def test_twenty_steps_of_experts_without_a_gap(model):
    parts = build(config(model, "float32", "eager"))
    experts = "experts 8x128x64 with bias inputs first" if "oss" in model else "experts 8x128x64"
    assert {experts, "combine 64"} <= parts.batch_invariance.self_test.keys()
    assert_lockstep(train(parts, steps=20))
    parts.close()


@pytest.mark.parametrize(
    ("model", "dtype", "settings"),
    [
        ("tiny-qwen3-moe", "bfloat16", ""),
        ("tiny-qwen2-moe", "bfloat16", ""),
        ("tiny-mixtral", "bfloat16", 'layout = "shared"\nactivation_checkpointing = true'),
        ("tiny-qwen3-moe", "float32", 'layout = "padded"\npadding_side = "left"'),
        ("tiny-gpt-oss", "bfloat16", 'layout = "shared"'),
        ("tiny-phi3", "bfloat16", ""),
        ("tiny-cohere2", "bfloat16", ""),
        *(pytest.param(name, "bfloat16", "", marks=pytest.mark.exhaustive) for name in MORE),
        ("tiny-gemma3", "bfloat16", ""),
        ("tiny-mistral", "float32", ""),
        ("tiny-gemma3", "float32", 'layout = "padded"\npadding_side = "left"'),
        ("tiny-llama", "bfloat16", 'layout = "padded"'),
        ("tiny-gemma3", "float32", "activation_checkpointing = true"),
        ("tiny-qwen3", "bfloat16", 'accumulate = "sample"'),
        ("tiny-gemma3", "float32", 'layout = "shared"'),
        ("tiny-llama", "bfloat16", 'layout = "shared"\nactivation_checkpointing = true'),
    ],
)
def test_eager_steps_without_a_gap(model, dtype, settings):
    parts = build(config(model, dtype, "eager", settings=settings))
    assert_lockstep(train(parts, steps=2))
    parts.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "execution"),
    [
        pytest.param("tiny-llama", "float32", "compile", marks=pytest.mark.exhaustive),
        pytest.param("tiny-qwen3", "bfloat16", "joint", marks=pytest.mark.exhaustive),
        ("tiny-gemma3", "bfloat16", "eager"),
        ("tiny-qwen3-moe", "float32", "eager"),
    ],
)
def test_adapters_without_a_gap(model, dtype, execution):
    pytest.importorskip("peft")
    targets = ["q_proj", "o_proj"] if "moe" in model else ["q_proj", "o_proj", "down_proj"]
    adapters = f"[model.lora]\nrank = 4\nalpha = 8.0\ntarget_modules = {targets}\n"
    parts = build(config(model, dtype, execution).replace("[data]", adapters + "[data]"))
    assert {"linear 4x64", "linear 64x4"} <= parts.batch_invariance.self_test.keys()
    assert_lockstep(train(parts, steps=4))
    parts.close()


@pytest.mark.exhaustive
def test_a_joint_graph_and_a_compiled_engine_without_a_gap():
    """Other graphs on the two sides, of the same ops."""
    parts = build(config("tiny-llama", "float32", "joint"))
    assert_lockstep(train(parts, steps=3))
    parts.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dtype", "execution", "flags"),
    [
        pytest.param("tiny-llama", "float32", "compile", FSDP2, marks=pytest.mark.exhaustive),
        pytest.param("tiny-llama", "float32", "joint", FSDP2, marks=pytest.mark.exhaustive),
        pytest.param("tiny-gemma3", "bfloat16", "eager", FSDP2, marks=pytest.mark.exhaustive),
        ("tiny-qwen3-moe", "float32", "eager", (*FSDP2, *ROUTERS)),
        pytest.param(
            "tiny-qwen3-moe", "float32", "compile", (*FSDP2, *ROUTERS), marks=pytest.mark.exhaustive
        ),
        pytest.param(
            "tiny-qwen3-moe", "float32", "eager", (*FSDP2, *ROUTERS, *EP), marks=pytest.mark.exhaustive
        ),
        pytest.param("tiny-gpt-oss", "bfloat16", "eager", (*FSDP2, *EP), marks=pytest.mark.exhaustive),
        ("tiny-llama", "bfloat16", "eager", (*FSDP2, "--train.ring", "2")),
        ("tiny-qwen3", "bfloat16", "eager", (*FSDP2, "--train.tp", "2")),
        pytest.param(
            "tiny-llama", "float32", "compile", (*FSDP2, "--train.tp", "2"), marks=pytest.mark.exhaustive
        ),
        pytest.param("tiny-gemma3", "bfloat16", "joint", DDP, marks=pytest.mark.exhaustive),
        pytest.param("tiny-qwen3", "bfloat16", "eager", DDP, marks=pytest.mark.exhaustive),
    ],
    ids=[
        "fsdp2, compile",
        "fsdp2, joint",
        "fsdp2, bfloat16",
        "fsdp2, experts",
        "fsdp2, experts, compile",
        "ep",
        "ep, bfloat16",
        "ring",
        "tp",
        "tp, compile",
        "ddp, joint",
        "ddp, bfloat16",
    ],
)
def test_two_ranks_without_a_gap(model, dtype, execution, flags, tmp_path):
    """Each rank samples with an engine of its own, or both with one (tp); gap and gradients are of all ranks.
    Twenty steps are those of one process, above."""
    (tmp_path / "run.toml").write_text(config(model, dtype, execution, minibatches=1))
    argv = ("train", "run.toml", "--run-dir", "run", "--ranks", "2", *flags)
    succeeds(*argv, "--train.deterministic", "--steps", "8", cwd=tmp_path, seconds=400)
    rows = read_lines(tmp_path / "run/metrics.jsonl")
    assert len(rows) == len({row["weights_hash"] for row in rows}) == 8
    for row in rows:
        assert row["logprob_gap_max"] == 0.0 and row["importance_ratio_max"] == 1.0
        # all that was scored was compared; a group without a signal is left out of both
        assert row["grad_norm"] > 0 and row["contract_verified"] == row["scored_share"] > 0.5
    if "moe" in model:  # counts and losses of both ranks
        assert all(row["experts/dropped_tokens"] == 0.0 and row["experts/aux_loss"] >= 1.9 for row in rows)
        assert all("experts/routes_changed" in row for row in rows[::2])
        assert any(0.0 < row["experts/routes_changed"] < 0.5 for row in rows[::2])


def _linear(monkeypatch, product):
    """Every linear, the head as well, computes this."""

    def into(x, weight, bias, *, tiles, out=None):
        result = product(x, weight, bias)
        return result if out is None else out.copy_(result)

    monkeypatch.setattr(row_ops, "tiled_product", into)
    monkeypatch.setattr(modules, "tiled_product", into)


def _needs_own_linears(parts):
    chosen = [
        verdict["choice"] for name, verdict in parts.batch_invariance.self_test.items() if "linear" in name
    ]
    if "stock" in chosen:
        pytest.skip("on this processor F.linear itself is batch-invariant")


def test_ordinary_linears_have_a_gap(monkeypatch):
    parts = build(config("tiny-llama", "float32", "eager"), gate=False)
    _needs_own_linears(parts)
    _linear(monkeypatch, F.linear)
    steps = train(parts, steps=2)
    parts.close()
    assert all(0 < step.recomputed.abs().max() < 1e-4 for step in steps)
    with pytest.raises(AssertionError, match="differ, max"):
        assert_lockstep(steps)


FEW = 32
"""Rows: those of a decode step and of a chunk of prefill are fewer, those of a pack more."""


def linear_twin(monkeypatch):
    def product(x, weight, bias):
        middle = x.shape[1] // 2 if x.shape[0] < FEW else x.shape[1]
        result = x[:, :middle] @ weight[:, :middle].t() + x[:, middle:] @ weight[:, middle:].t()
        return result if bias is None else result + bias

    _linear(monkeypatch, product)


def _sums_twin(monkeypatch, applies):
    whole = row_ops.row_sums

    def sums(x):
        if not applies(x) or x.shape[0] >= FEW:
            return whole(x)
        return x.unflatten(1, (4, -1)).sum(-1).sum(-1)

    monkeypatch.setattr(row_ops, "row_sums", sums)


def norm_twin(monkeypatch):
    _sums_twin(monkeypatch, lambda x: x.shape[1] == 64)


def token_stats_twin(monkeypatch):
    _sums_twin(monkeypatch, lambda x: x.shape[1] == 256)


def silu_twin(monkeypatch):
    whole = row_ops._silu
    monkeypatch.setattr(row_ops, "_silu", lambda x: x * x.sigmoid() if _few(x) else whole(x))


def gelu_twin(monkeypatch):
    whole = row_ops._gelu
    monkeypatch.setattr(
        row_ops, "_gelu", lambda x: F.gelu(x.double(), approximate="tanh").float() if _few(x) else whole(x)
    )


def _few(x):
    return x.shape[-2] < FEW


def attention_twin(monkeypatch):
    whole, keys = varlen.tiled_attention, varlen.KEYS

    def attention(q, *rest, **options):
        monkeypatch.setattr(varlen, "KEYS", 8 if q.shape[0] < FEW else keys)
        return whole(q, *rest, **options)

    monkeypatch.setattr(varlen, "tiled_attention", attention)


@pytest.mark.parametrize(
    ("twin", "model"),
    [
        (linear_twin, "tiny-llama"),
        (norm_twin, "tiny-llama"),
        (silu_twin, "tiny-llama"),
        (gelu_twin, "tiny-gemma3"),
        (attention_twin, "tiny-gemma3"),
        (token_stats_twin, "tiny-llama"),
    ],
)
def test_an_op_whose_sums_depend_on_the_number_of_rows_is_seen(twin, model, monkeypatch):
    """Each is put in after the self-test, which would find it."""
    parts = build(config(model, "float32", "eager"), gate=False)
    if twin is linear_twin:
        _needs_own_linears(parts)
    assert not train(parts, steps=1)[0].recomputed.any()
    twin(monkeypatch)
    with pytest.raises(AssertionError, match=r"step 0: \d+ of \d+ differ, max"):
        assert_lockstep(train(parts, steps=1))
    parts.close()


def test_a_run_whose_ops_disagree_stops(monkeypatch):
    parts = build(config("tiny-llama", "float32", "eager"))
    norm_twin(monkeypatch)
    with raises(TrainError, "values-differ", step=0) as caught:  # at which token depends on the CPU
        train(parts, steps=1)
    assert caught.value.fields.keys() >= {"name", "position", "token"}
    parts.close()
