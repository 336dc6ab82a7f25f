import dataclasses
import signal
import threading
import weakref

import pytest
import torch
from raising import raises
from transformers import AutoModelForCausalLM

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.errors import EngineError
from lockstep.models.load import LoadedModel, allocated, load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.schema.weights import WeightUpdate

FAMILIES = ("llama", "qwen3", "mistral", "gemma3")
PLAIN = SamplingParams(max_tokens=20)


def engine_of(model: LoadedModel, max_batch: int = 64, **changes) -> HFEngine:
    return HFEngine(EngineConfig(max_batch=max_batch), model=dataclasses.replace(model, **changes))


def prompt(model: LoadedModel, length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(3, vocab(model), (length,), generator=generator).tolist())


def vocab(model: LoadedModel) -> int:
    return model.module.config.vocab_size


def request(model, length=6, seeds=(0,), sampling=PLAIN, **changes) -> GenerationRequest:
    return GenerationRequest(
        prompt_token_ids=prompt(model, length, length),
        sampling=dataclasses.replace(sampling, **changes),
        seeds=tuple(seeds),
    )


def mixed_requests(model: LoadedModel) -> list[GenerationRequest]:
    """Prompts and completions on both sides of the sliding window (8) of the tiny models."""
    return [
        request(model, 3, range(0, 3), max_tokens=20),
        request(model, 17, range(9, 13), max_tokens=9),
        request(model, 30, range(20, 22), max_tokens=25, temperature=0.7),
        request(model, 5, (30,), max_tokens=30, temperature=0.0),
        request(model, 11, range(50, 55), max_tokens=3, top_k=20),
        request(model, 8, (60,), max_tokens=14, top_p=0.9, repetition_penalty=1.2, min_tokens=5),
    ]


def eager_reference(model: LoadedModel) -> torch.nn.Module:
    config = type(model.module.config).from_dict(model.module.config.to_dict())
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    reference.load_state_dict(model.module.state_dict())
    return reference.eval()


def full_forward_logprobs(model: LoadedModel, completion, temperature: float) -> torch.Tensor:
    """The slow reference: transformers' own eager attention over prompt and completion, one at a time."""
    ids = torch.tensor([completion.prompt_token_ids + completion.token_ids])
    with torch.no_grad():
        logits = eager_reference(model)(ids).logits[0, len(completion.prompt_token_ids) - 1 : -1] / (
            temperature or 1.0
        )
    return logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_full_forward(family, tiny_models):
    model = tiny_models[family]
    requests = mixed_requests(model)
    gaps = []
    for req, group in zip(requests, engine_of(model, max_batch=7).generate(requests), strict=True):
        for completion in group:
            reference = full_forward_logprobs(model, completion, req.sampling.temperature)
            gaps.append((reference - torch.tensor(completion.logprobs)).abs())
    gap = torch.cat(gaps)
    print(f"{family}: logprob gap mean {gap.mean():.2e} max {gap.max():.2e} of {len(gap)} tokens")
    assert gap.mean() <= 1e-5 and gap.max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_equal_alone_in_a_batch_and_with_rows_that_come_and_go(family, tiny_models):
    model = tiny_models[family]
    requests = mixed_requests(model)
    wide = engine_of(model).generate(requests)
    narrow = engine_of(model, max_batch=3).generate(requests)
    again = engine_of(model)
    for req, one, other in zip(requests, wide, narrow, strict=True):
        assert [c.token_ids for c in one] == [c.token_ids for c in other]
        for seed, completion in zip(req.seeds, one, strict=True):
            alone = again.generate([dataclasses.replace(req, seeds=(seed,))])[0][0]
            assert (alone.token_ids, alone.seed) == (completion.token_ids, seed)
    assert len({c.token_ids for c in wide[0]}) == 3  # different seeds, different samples


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_transformers_generate(family, tiny_models):
    model = tiny_models[family]
    reference = eager_reference(model)
    ids = torch.tensor([prompt(model, 12, 12)])
    out = reference.generate(ids, do_sample=False, max_new_tokens=40, eos_token_id=None, pad_token_id=0)
    greedy = request(model, 12, max_tokens=40, temperature=0.0, ignore_eos=True)
    assert list(engine_of(model).generate([greedy])[0][0].token_ids) == out[0, 12:].tolist()


def test_a_partial_rollout_goes_on_as_if_it_had_not_stopped(tiny):
    """Noise depends on (seed, position) only, so prompt + half a completion gives the other half."""
    engine = engine_of(tiny)
    req = request(tiny, seeds=(5,), ignore_eos=True)
    whole = engine.generate([req])[0][0].token_ids
    rest = dataclasses.replace(
        req,
        prompt_token_ids=req.prompt_token_ids + whole[:8],
        sampling=dataclasses.replace(req.sampling, max_tokens=12),
    )
    assert engine.generate([rest])[0][0].token_ids == whole[8:]


def test_eos_stop_ids_min_tokens_and_limits_end_samples(tiny):
    free = engine_of(tiny, eos_token_ids=()).generate([request(tiny, seeds=range(4))])[0]
    end = free[0].token_ids[4]
    cut = free[0].token_ids[: free[0].token_ids.index(end) + 1]
    by_eos = engine_of(tiny, eos_token_ids=(1, end)).generate([request(tiny)])[0][0]
    assert (by_eos.token_ids, by_eos.finish_reason, by_eos.stop_reason) == (cut, "stop", end)
    engine = engine_of(tiny, eos_token_ids=(end,))
    by_id = engine_of(tiny, eos_token_ids=()).generate([request(tiny, stop_token_ids=(end,))])[0][0]
    assert (by_id.token_ids, by_id.stop_reason) == (cut, end)
    ignored = engine.generate([request(tiny, ignore_eos=True)])[0][0]
    assert (ignored.token_ids, ignored.finish_reason) == (free[0].token_ids, "length")
    held = engine.generate([request(tiny, min_tokens=15)])[0][0]
    assert end not in held.token_ids[:15] and held.token_ids[: len(cut) - 1] == cut[:-1]
    assert len(held.logprobs) == len(held.token_ids)


def test_the_context_ends_a_sample_and_too_long_prompts_are_refused(tiny):
    engine = engine_of(tiny, max_positions=10, eos_token_ids=())
    out = engine.generate([request(tiny, 6, max_tokens=50)])[0][0]
    assert (len(out.token_ids), out.finish_reason, out.stop_reason) == (4, "length", None)
    with raises(EngineError, "too-long", request=0, limit=10):
        engine.generate([request(tiny, 10)])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "empty: 1"),
        ((1, 10**6), "outside-vocabulary: 1, 1000000"),
        ((-1, 2), "outside-vocabulary: 1, -1"),
    ],
)
def test_bad_prompts_are_refused_by_name(tiny, ids, message):
    good = request(tiny)
    with raises(EngineError, message):
        engine_of(tiny).generate([good, dataclasses.replace(good, prompt_token_ids=ids)])


@pytest.mark.parametrize(
    "wrong", [{"top_k": 0}, {"top_p": 0.0}, {"temperature": -1.0}, {"min_tokens": 99}, {"max_tokens": 0}]
)
def test_bad_sampling_is_refused(tiny, wrong):
    with raises(EngineError, f"out-of-range: sampling.{next(iter(wrong))}"):
        engine_of(tiny).generate([request(tiny, **wrong)])


def test_the_weights_are_the_trainers_own(tiny_models):
    model = tiny_models["qwen3"]
    engine = engine_of(model)
    before = engine.generate([request(model)])[0][0]
    weight = model.module.get_output_embeddings().weight
    saved = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(-1)
    engine.update_weights(
        WeightUpdate(policy_version=7, tensors=lambda: iter(()), shared_module=model.module)
    )
    after = engine.generate([request(model)])[0][0]
    with torch.no_grad():
        weight.copy_(saved)
    assert (before.policy_version, after.policy_version) == (0, 7)
    assert before.token_ids != after.token_ids
    with raises(EngineError, "other-model: module"):
        engine.update_weights(
            WeightUpdate(policy_version=8, tensors=lambda: iter(()), shared_module=torch.nn.Linear(1, 1))
        )


def test_named_weights_are_copied_all_or_nothing(tiny_models):
    source, model = tiny_models["qwen3"], copy_of(tiny_models["qwen3"])
    with torch.no_grad():
        for p in model.module.parameters():
            p.mul_(0.5)
    engine = engine_of(model)
    halved = engine.generate([request(model)])[0][0].token_ids
    good = dict(source.module.named_parameters(remove_duplicate=False))
    name = next(iter(good))
    other = "model.layers.0.mlp.up_proj.weight"

    def push(named, **known):
        engine.update_weights(WeightUpdate(policy_version=1, tensors=lambda: iter(named.items()), **known))

    def shapes(named):
        return {name: tuple(tensor.shape) for name, tensor in named.items()}

    for bad, message in (
        (good | {"extra.weight": torch.zeros(1)}, "wrong-weights: extra.weight"),
        ({k: v for k, v in good.items() if k != other}, f"wrong-weights: {other}"),
        (good | {other: torch.zeros(2, 2)}, "wrong-shape: model.layers.0.mlp.up_proj.weight"),
    ):
        with raises(EngineError, message):
            push(bad, shapes=shapes(bad))
        assert engine.generate([request(model)])[0][0].token_ids == halved
        with raises(EngineError, message):  # found halfway
            push(bad)
        with raises(EngineError, "wrong-state: dirty"):
            engine.generate([request(model)])
        halves = {name: tensor * 0.5 for name, tensor in good.items()}
        push(halves)
        assert engine.generate([request(model)])[0][0].token_ids == halved
    with raises(EngineError, "values-differ: lm_head.weight"):
        push(good | {name: good[name] + 1})
    with raises(EngineError, "wrong-state: dirty"):
        engine.submit(request(model))
    push(good)
    assert (
        engine.generate([request(model)])[0][0].token_ids
        == engine_of(source).generate([request(model)])[0][0].token_ids
    )


class Gathered:
    """Gives weights as ranks that have parts of them do: each is new memory."""

    def __init__(self, weights):
        self.weights, self.given, self.alive, self.most = weights, 0, 0, 0

    def __call__(self):
        for name, weight in self.weights.items():
            whole = weight.detach().clone()
            self.given, self.alive = self.given + 1, self.alive + 1
            self.most = max(self.most, self.alive)
            weakref.finalize(whole, self._freed)
            yield name, whole
            del whole

    def _freed(self):
        self.alive -= 1


def test_weights_that_are_sent_are_never_there_twice(tiny_models):
    """One tensor at a time; an update that is refused goes through all of them, for the other ranks."""
    source, model = tiny_models["llama"], copy_of(tiny_models["llama"])
    engine = engine_of(model)
    weights = dict(source.module.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    gathered = Gathered(weights)
    engine.update_weights(WeightUpdate(policy_version=1, tensors=gathered, shapes=shapes))
    assert (gathered.given, gathered.most) == (len(weights), 1)
    for known, more in ((shapes | {"extra": (1,)}, {}), (None, {"extra": torch.zeros(1)})):
        gathered = Gathered(more | weights)
        with raises(EngineError, "wrong-weights: extra"):
            engine.update_weights(WeightUpdate(policy_version=2, tensors=gathered, shapes=known))
        assert gathered.given == len(gathered.weights)


def test_an_engine_without_weights_sleeps_without_them(tiny):
    """Weights that are sent are freed with the cache, and must come again before the next sample."""
    loaded = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32"),
        attention="sdpa",
        device=torch.device("cpu"),
        materialize=False,
    )
    model = allocated(loaded, device=torch.device("cpu"))
    engine = engine_of(model)
    weights = dict(tiny.module.named_parameters(remove_duplicate=False))

    def held():
        return sum(p.untyped_storage().nbytes() for p in model.module.parameters())

    expected = engine_of(tiny).generate([request(tiny)])
    whole = held()
    assert whole == sum(p.nbytes for p in tiny.module.parameters())
    for version in (1, 2):
        with raises(EngineError, "wrong-state: dirty"):
            engine.generate([request(tiny)])
        update = WeightUpdate(policy_version=version, tensors=lambda: iter(weights.items()))
        engine.update_weights(update)
        assert held() == whole
        found = engine.generate([request(tiny)])
        assert [c.token_ids for c in found[0]] == [c.token_ids for c in expected[0]]
        assert [c.logprobs for c in found[0]] == [c.logprobs for c in expected[0]]
        engine.sleep()
        assert held() == 0
        engine.wake()


def copy_of(model: LoadedModel) -> LoadedModel:
    import copy

    return dataclasses.replace(model, module=copy.deepcopy(model.module))


def test_the_prompt_of_a_group_is_computed_once(tiny):
    engine = engine_of(tiny)
    group = engine.generate([request(tiny, 9, range(4), ignore_eos=True)])[0]
    assert [c.cached_tokens for c in group] == [0, 9, 9, 9]
    stats = engine.stats()
    assert (stats.requests, stats.prompt_tokens, stats.cached_tokens) == (1, 36, 27)
    assert stats.completion_tokens == 80 and stats.kv_cache_bytes > 0 and stats.generate_seconds > 0


def test_completions_stream_and_the_global_generator_is_left_alone(tiny):
    seen = {}
    torch.manual_seed(3)
    before = torch.get_rng_state()
    out = engine_of(tiny).generate(
        mixed_requests(tiny), on_completion=lambda r, s, c: seen.setdefault((r, s), c)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert seen == {(r, s): c for r, group in enumerate(out) for s, c in enumerate(group)}


def test_tokens_are_told_as_they_come(tiny):
    engine, told = engine_of(tiny), []
    engine.on_token = lambda number, sample, ids: told.append((number, sample, tuple(ids)))
    ((first, second),) = engine.generate([request(tiny, 6, range(2), ignore_eos=True)])
    for sample, completion in enumerate((first, second)):
        wanted = [completion.token_ids[:n] for n in range(1, len(completion.token_ids) + 1)]
        assert [ids for number, k, ids in told if (number, k) == (0, sample)] == wanted
    assert len(told) == 40


def test_abort_from_another_thread_ends_running_and_waiting_samples(tiny):
    engine = engine_of(tiny, max_batch=2, max_positions=100_000)
    requests = [request(tiny, 4, range(3), max_tokens=90_000, ignore_eos=True)]
    timer = threading.Timer(0.5, engine.abort)
    timer.start()
    group = engine.generate(requests)[0]
    assert [c.finish_reason for c in group] == ["abort"] * 3
    assert len(group[0].token_ids) > 0 and group[2].token_ids == ()
    assert engine.generate([request(tiny)])[0][0].finish_reason != "abort"


def test_ctrl_c_passes_through_and_the_engine_goes_on(tiny):
    engine = engine_of(tiny, max_positions=100_000)
    timer = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        engine.generate([request(tiny, max_tokens=90_000, ignore_eos=True)])
    again = engine.generate([request(tiny)])[0][0]
    assert again.token_ids == engine_of(tiny).generate([request(tiny)])[0][0].token_ids


def test_sleeping_and_closed_engines_refuse(tiny):
    engine = engine_of(tiny)
    engine.sleep()
    with raises(EngineError, "wrong-state: asleep"):
        engine.generate([request(tiny)])
    engine.wake()
    assert engine.generate([request(tiny)])
    engine.close()
    with raises(EngineError, "wrong-state: closed"):
        engine.generate([request(tiny)])


def test_logits_that_are_not_finite_name_the_sample(tiny):
    model = copy_of(tiny)
    with torch.no_grad():
        model.module.get_output_embeddings().weight.fill_(float("nan"))
    with raises(EngineError, "not-finite", request=0):
        engine_of(model).generate([request(model)])


def test_running_out_of_memory_names_bytes_and_settings(tiny, monkeypatch):
    engine = engine_of(tiny)

    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(engine._cache, "reserve", fail)
    with raises(EngineError, "out-of-memory: engine.max_batch"):
        engine.generate([request(tiny)])
