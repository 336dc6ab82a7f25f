"""The recorder around a backend that only pretends to train."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sampled
import torch
from recorded import recording_header
from torch import Tensor, nn

from lockstep.config.record import RecordConfig
from lockstep.observe.metrics import Spans
from lockstep.packing import pack
from lockstep.protocols.train import StepStats
from lockstep.recording import Recording
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.recording.recorder import Recorder, RecorderSettings, draws_random_numbers
from lockstep.schema.batch import PackedBatch, PolicyBatch, PolicySample
from lockstep.schema.rollout import Rollout, RolloutGroup

HEADER = recording_header(
    model={"name": "shape:tiny-llama"}, vocab_size=100, algorithm={"name": "grpo"}, max_tokens=8
)


class Backend:
    """Adds 1 to every weight in a step; the loss of batch i is i + 0.5."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.on_forward: Callable[[], Any] = lambda: None
        self.on_step: Callable[[], Any] = lambda: None
        self.saw: list[PackedBatch] = []

    def forward_backward(self, batches: Sequence[PackedBatch], loss: Any) -> StepStats:
        self.on_forward()
        self.saw += batches
        return StepStats(
            losses=[torch.tensor(i + 0.5) for i in range(len(batches))],
            logprobs=[torch.where(b.loss_mask, -1.0 - i, 0.0) for i, b in enumerate(batches)],
            entropy=[torch.where(b.loss_mask, 2.0 + i, 0.0) for i, b in enumerate(batches)],
        )

    @torch.no_grad()
    def optimizer_step(self) -> dict[str, float]:
        self.on_step()
        for parameter in self.module.parameters():
            parameter.add_(1.0)
        return {"grad_norm": 0.25, "lr": 1.0}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: (name, args, kwargs)


def batch(*lengths: int, first: int = 0) -> PolicyBatch:
    """Documents of ascending ids; all but the first token of each are trained on."""
    samples = []
    for number, length in enumerate(lengths):
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = False
        samples.append(
            PolicySample(
                token_ids=torch.arange(length) + number,
                loss_mask=mask,
                sample_id=first + number,
                rollout_logprobs=torch.where(mask, -0.5, 0.0),
                advantages=torch.where(mask, 1.0, 0.0),
            )
        )
    packed = pack(samples, [torch.full((n,), 0.125) for n in lengths])
    assert isinstance(packed, PolicyBatch)
    return packed


class Case:
    """A recorder in a folder, around a Backend."""

    def __init__(self, directory: Path, *, module: nn.Module | None = None) -> None:
        self.directory = directory
        self.module = module or nn.Linear(2, 2)
        self.backend = Backend(self.module)

    def start(self, *, spans: Spans | None = None, header: Any = HEADER, **settings: Any) -> Recorder:
        names = {f.name for f in dataclasses.fields(RecorderSettings)}
        config = RecordConfig(**{n: v for n, v in settings.items() if n not in names})
        rest = {n: v for n, v in settings.items() if n in names}
        self.recorder = Recorder(
            self.directory,
            RecorderSettings(config=config, header=header, **rest),
            module=self.module,
            spans=spans,
        )
        self.around: Any = self.recorder.around(self.backend)  # type: ignore[arg-type]
        return self.recorder

    def step(self, step: int, *updates: Sequence[PackedBatch]) -> None:
        self.recorder.begin_step(step)
        for batches in updates or ([batch(3, 4), batch(5, first=2)],):
            self.around.forward_backward(batches, None)
            self.around.optimizer_step()

    def read(self) -> Recording:
        return Recording.open(self.directory)

    @property
    def print(self) -> str:
        return fingerprint(module_tensors(self.module).items())


@pytest.fixture
def case(tmp_path: Path) -> Case:
    return Case(tmp_path / "recordings")


def test_inputs_are_on_the_disk_before_the_backend_sees_them(case: Case) -> None:
    case.start()
    seen: list[Any] = []
    case.backend.on_forward = lambda: seen.extend(case.read())
    before = case.print
    case.step(0, [batch(3, 4), batch(5, first=2)])
    assert [each.meta.key for each in seen] == [(0, 0, 0), (0, 1, 0)]
    for each, fed in zip(seen, case.backend.saw, strict=True):
        assert each.meta.outcome == "pending" and each.outputs is None and each.meta.weights == before
        assert torch.equal(each.batch.token_ids, fed.token_ids) and each.batch.lengths == fed.lengths
    case.recorder.close()
    done = list(case.read())
    assert [each.meta.outcome for each in done] == ["finished"] * 2
    assert [each.outputs.loss for each in done] == [0.5, 1.5]  # type: ignore[union-attr]
    for number, each in enumerate(done):
        assert each.outputs is not None and each.outputs.grad_norm == 0.25
        mask = each.batch.loss_mask
        assert torch.equal(each.outputs.logprobs, torch.where(mask, -1.0 - number, 0.0))  # type: ignore
        assert torch.equal(each.outputs.entropy, torch.where(mask, 2.0 + number, 0.0))  # type: ignore


def test_updates_and_calls_of_a_step_are_counted(case: Case) -> None:
    case.start(updates_per_step=3)
    case.step(0, [batch(3)], [batch(4)], [batch(5)])
    case.recorder.begin_step(4)
    case.around.forward_backward([batch(3), batch(4)], None)
    case.around.forward_backward([batch(5)], None)  # the same optimizer step
    case.around.optimizer_step()
    metas = case.read().metas
    assert [m.key[:2] for m in metas] == [(0, 0), (1, 0), (2, 0), (12, 0), (12, 1), (12, 2)]
    assert [m.step for m in metas] == [0, 0, 0, 4, 4, 4]
    assert [m.num_micro_batches for m in metas] == [1, 1, 1, 3, 3, 3]
    assert len({m.weights for m in metas}) == 4


def test_every_kth_input_counts_all_of_the_run(case: Case) -> None:
    case.start(every=3, first_step=1, last_step=3)
    for step in range(6):
        case.step(step)  # inputs 0 to 11, two to a step
    case.recorder.close()
    assert [tuple(m.key[:2]) for m in case.read().metas] == [(1, 1), (3, 0)]  # inputs 3 and 6
    assert case.recorder.inputs_seen == 12


def test_resumed_it_counts_on_and_replaces(case: Case) -> None:
    recorder = case.start(every=3)
    for step in range(3):
        case.step(step)
    del recorder  # killed: never closed
    case.start(every=3, resume_at=1, inputs_seen=2)
    assert [tuple(m.key[:2]) for m in case.read().metas] == [(0, 0)]
    for step in range(1, 4):
        case.step(step)
    case.recorder.close()
    assert [tuple(m.key[:2]) for m in case.read().metas] == [(0, 0), (1, 1), (3, 0)]


def test_a_failing_forward_is_recorded_and_goes_on(case: Case) -> None:
    case.start()

    def fail() -> None:
        raise RuntimeError("kernel " + 3000 * "x")

    case.step(0)
    case.backend.on_forward = fail
    with pytest.raises(RuntimeError, check=lambda error: error.args[0].startswith("kernel ")):
        case.step(1)
    failed = [each for each in case.read() if each.meta.step == 1]
    assert [each.meta.outcome for each in failed] == ["failed"] * 2 and failed[0].outputs is None
    assert failed[0].meta.error is not None and failed[0].meta.error.startswith("RuntimeError: kernel xxx")
    assert len(failed[0].meta.error) == 2000


def test_a_failing_optimizer_step_keeps_what_the_forward_gave(case: Case) -> None:
    case.start()

    def fail() -> None:
        raise ValueError("the norm is nan")

    case.backend.on_step = fail
    with pytest.raises(ValueError, check=lambda error: error.args == ("the norm is nan",)):
        case.step(0)
    for number, each in enumerate(case.read()):
        assert each.meta.outcome == "failed" and each.meta.error == "ValueError: the norm is nan"
        assert each.outputs is not None
        assert each.outputs.loss == number + 0.5 and each.outputs.grad_norm is None


def test_an_interrupt_is_no_failure(case: Case) -> None:
    case.start()

    def interrupt() -> None:
        raise KeyboardInterrupt

    case.backend.on_forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        case.step(0)
    case.recorder.close()
    assert [m.outcome for m in case.read().metas] == ["pending"] * 2


@pytest.mark.parametrize(
    ("weights", "folders", "named"),
    [
        ("first", ["step-000002"], {2: "weights/step-000002"}),
        ("none", [], {}),
        (
            "every 1",
            [f"step-00000{n}" for n in (2, 3, 4, 5)],
            {n: f"weights/step-00000{n}" for n in (2, 3, 4, 5)},
        ),
        ("every 3", ["step-000002", "step-000003"], {2: "weights/step-000002", 3: "weights/step-000003"}),
    ],
)
def test_which_weights_are_stored(
    weights: str, folders: list[str], named: dict[int, str], case: Case
) -> None:
    case.start(weights=weights, first_step=2, last_step=5, updates_per_step=2)
    for step in range(7):
        case.step(step, [batch(3)], [batch(4)])
    case.recorder.close()
    kept = case.directory / "weights"
    assert sorted(p.name for p in kept.glob("*")) == folders
    metas = case.read().metas
    # the second update of a step has other weights, and names none
    assert {(m.step, m.update % 2): m.checkpoint for m in metas if m.checkpoint} == {
        (step, 0): name for step, name in named.items()
    }
    assert len({m.weights for m in metas}) == 8


def test_a_checkpoint_of_the_run_is_named_where_it_lies(case: Case) -> None:
    folder = case.directory.parent / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    for name in ("complete.json", "model.safetensors"):  # of several ranks there is more than one such file
        (folder / name).write_text("{}")
    case.start(weights="none", updates_per_step=2)
    for step in range(3):
        case.step(step, [batch(3)], [batch(3)])
    assert [m.checkpoint for m in case.read().metas] == [
        *(None, None),
        *("../checkpoints/step-000001", None),
        *(None, None),
    ]


def test_resumed_the_first_weights_are_not_stored_again(case: Case) -> None:
    case.start(weights="every 2")
    for step in range(5):
        case.step(step)
    folder = case.directory / "weights"
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000", "step-000002", "step-000004"]
    case.start(weights="first", resume_at=3, inputs_seen=6)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000", "step-000002"]
    case.step(3)
    assert sorted(p.name for p in folder.iterdir()) == ["step-000000", "step-000002"]


def test_generator_state_only_where_the_forward_draws(tmp_path: Path) -> None:
    plain = Case(tmp_path / "plain")
    plain.start()
    plain.step(0)
    assert [each.rng for each in plain.read()] == [None, None]
    drawing = Case(tmp_path / "drawing", module=nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1)))
    drawing.start()
    drawing.backend.on_forward = lambda: torch.rand(3)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    drawing.step(0)
    first, second = drawing.read()
    assert first.rng is not None and torch.equal(first.rng, state) and second.rng is None


def test_what_draws_random_numbers() -> None:
    assert not draws_random_numbers(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0)))
    assert draws_random_numbers(nn.Sequential(nn.Dropout1d(0.5)))
    module = nn.Linear(2, 2)
    for p, expected in ((0.0, False), (None, False), (0.1, True)):
        module.config = type("Config", (), {"attention_dropout": p})()  # type: ignore[assignment]
        assert draws_random_numbers(module) is expected


def group(index: int, *rewards: float) -> RolloutGroup:
    def rollout(number: int, reward: float) -> Rollout:
        made = sampled.completion((1,), (2, 3), -0.5, stop_reason=3, seed=2**62 + number, engine="hf")
        return sampled.rollout(made, reward, {"a": reward / 2, "kl": -1.0})

    return sampled.group(list(map(rollout, range(len(rewards)), rewards)), index)


def test_documents_go_with_their_sample_ids(case: Case) -> None:
    case.start()
    case.recorder.begin_step(0)
    case.recorder.see([group(7, 0.0, 1.0), group(9, 0.5, 0.25)])
    case.around.forward_backward([batch(3, first=3), batch(3, 3, first=1)], None)
    case.around.optimizer_step()
    case.step(1)  # what is known of a step does not go on to the next
    documents = [m.documents for m in case.read().metas]
    assert [[(d["prompt_index"], d["sample"], d["reward"]) for d in ds] for ds in documents] == [
        [(9, 1, 0.25)],
        [(7, 1, 1.0), (9, 0, 0.5)],
        [],
        [],
    ]
    assert documents[0][0] == {
        "prompt_index": 9,
        "sample": 1,
        "reward": 0.25,
        "rewards": {"a": 0.125, "kl": -1.0},
        "finish_reason": "stop",
        "seed": 2**62 + 1,
        "spans": [[0, 2]],
    }


def test_two_ranks_write_side_by_side(tmp_path: Path) -> None:
    header = dataclasses.replace(HEADER, world_size=2, mesh={"dp": 2})
    cases = [Case(tmp_path / "recordings") for _ in range(2)]
    state = cases[0].module.state_dict()
    cases[1].module.load_state_dict(state)
    for rank, each in enumerate(cases):
        each.start(header=header, rank=rank, world_size=2, mesh={"dp": rank})
    for each in cases:
        each.step(0, [batch(3), batch(4)])
    for each in cases:
        each.recorder.close()
    metas = cases[0].read().metas
    assert [tuple(m.key) for m in metas] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert [m.mesh["dp"] for m in metas] == [0, 1, 0, 1] and {m.world_size for m in metas} == {2}
    assert {m.checkpoint for m in metas} == {"weights/step-000000"}


def test_what_it_does_is_timed_and_what_it_does_not_is_not(case: Case) -> None:
    spans = Spans()
    case.start(spans=spans, last_step=0)
    case.step(0)
    assert 0 < spans.flush()["time/record"] < 1
    case.step(1)
    assert "time/record" not in spans.flush()


def test_everything_else_goes_to_the_backend(case: Case) -> None:
    case.start()
    assert case.around.weights(policy_version=3) == ("weights", (), {"policy_version": 3})
    assert case.around.logprobs([]) == ("logprobs", ([],), {})
    assert case.around.ref() == ("ref", (), {})
    assert case.around.save(Path("x")) == ("save", (Path("x"),), {"background": False})
    case.around.load(Path("x"), verified=True)
    case.around.export(Path("x"))
    case.around.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_device_are_brought_home(case: Case) -> None:
    case.start()
    on_device: Tensor = torch.full((3,), -0.75, device="cuda")
    fed = dataclasses.replace(batch(3), old_logprobs=on_device * batch(3).loss_mask.cuda())
    case.step(0, [fed])
    (read,) = case.read()
    assert isinstance(read.batch, PolicyBatch) and read.batch.old_logprobs is not None
    assert read.batch.old_logprobs.tolist() == [-0.75, -0.75, 0.0]
