import contextlib
import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from raising import raises
from sampled import FakeEngine
from starting import until
from torch._C._distributed_c10d import HashStore

from lockstep.config.data import DataConfig
from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.data.lazy import LazyItems, Outcome
from lockstep.data.prompts import FixedPrompts
from lockstep.errors import EngineError, RewardError
from lockstep.observe.metrics import Spans
from lockstep.ranks.process_group import decode_object, encode_object
from lockstep.ranks.shared_queue import SharedQueue
from lockstep.rollout.environment import SingleTurn
from lockstep.rollout.rewards import Scored
from lockstep.rollout.sampler import GroupSampler, Resampling, SampleKey, sample_seed, sampling_params
from lockstep.schema.rollout import Prompt, SamplingParams


class FakeRewards:
    """Reward = the completion's number; multiples of `drop` are dropped."""

    def __init__(self, drop=None):
        self.drop = drop
        self.inputs = []

    def score(self, inputs):
        self.inputs += inputs
        return [
            None
            if self.drop and int(i.completion) % self.drop == 0
            else Scored(total=float(i.completion), by_name={"n": 1.0})
            for i in inputs
        ]

    def pop_counts(self):
        return {"dropped": 2}


class Prompts:
    def __init__(self, size):
        self.size = size

    def batch(self, step, n, seed):
        return [make_prompt((step * n + j + (seed % 97 if seed > 1000 else 0)) % self.size) for j in range(n)]


def make_prompt(i):
    return Prompt(index=i, token_ids=(i, 1), text=f"prompt {i}", row={"answer": i})


class Numbers(SingleTurn):
    """The tasks of Prompts and the rewards of FakeRewards."""

    report, fingerprint = {}, None

    def __init__(self, rewards=None, prompts=None):
        self.rewards, self.prompts, self.reward_models = rewards or FakeRewards(), prompts, None


def sample(engine=None, rewards=None, prompts=(3, 1), on_progress=None, environment=None):
    sampler = GroupSampler(
        engine=engine or FakeEngine(),
        environment=environment or Numbers(rewards),
        on_progress=on_progress,
    )
    key = SampleKey(run_seed=5, step=2)
    sampling = SamplingConfig(max_tokens=4)
    return sampler.groups([make_prompt(i) for i in prompts], key, sampling=sampling, group_size=3)


def step(engine, keep, *, prompts=None, max_rounds=10, n=4):
    return GroupSampler(engine=engine, environment=Numbers(prompts=prompts or Prompts(1000))).step(
        SampleKey(run_seed=0, step=0),
        rollout=RolloutConfig(prompts_per_step=n, group_size=2),
        resampling=None if keep is None else Resampling(keep=keep, max_rounds=max_rounds),
    )


def test_seeds_are_stable_63_bit_and_distinct():
    # BLAKE2b of "lockstep sample RUN STEP PROMPT SAMPLE", worked out apart: a change would change every run
    assert sample_seed(0, 0, 0, 0) == 5106079573773175748
    assert sample_seed(1, 2, 3, 4) == 2051771142880538700
    assert sample_seed(0, -1, 7, 15) == 2662110231344569675
    seeds = {
        sample_seed(r, s, p, i) for r in range(5) for s in range(5) for p in range(12) for i in range(12)
    }
    assert len(seeds) == 5 * 5 * 12 * 12 and all(0 <= s < 1 << 63 for s in seeds)


def test_every_setting_reaches_the_engine():
    values = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "stop": ("x",),
        "stop_token_ids": (4,),
        "keep_stop": False,
        "ignore_eos": True,
        "skip_special_tokens": True,
    }
    params = sampling_params(SamplingConfig(**values))
    fields = {f.name for f in dataclasses.fields(SamplingParams)} - {"logprob_kind"}
    assert {name: getattr(params, name) for name in fields} == values


def test_groups_come_in_prompt_order_with_their_seeds_and_rewards():
    engine, rewards, progress = FakeEngine(), FakeRewards(), []
    out = sample(engine, rewards, on_progress=lambda done, total: progress.append((done, total)))
    assert [g.prompt.index for g in out.groups] == [3, 1]
    assert [i.index for i in rewards.inputs] == [3, 3, 3, 1, 1, 1]
    assert engine.requests[1].seeds == tuple(sample_seed(5, 2, 1, i) for i in range(3))
    for group in out.groups:
        assert [r.reward for r in group.rollouts] == [float(r.trajectory.seed % 100) for r in group.rollouts]
    assert progress[-1] == (6, 6) and len(progress) == 6
    assert (rewards.inputs[4].prompt, rewards.inputs[4].row) == ("prompt 1", {"answer": 1})
    assert out.counts["reward/dropped"] == 2.0


def test_dropped_rollouts_leave_and_lone_ones_take_their_group_along():
    everything = sample(prompts=range(20))
    out = sample(rewards=FakeRewards(drop=3), prompts=range(20))
    left = [[r for r in g.rollouts if int(r.trajectory.text) % 3] for g in everything.groups]
    assert [list(g.rollouts) for g in out.groups] == [group for group in left if len(group) >= 2]
    assert [(r.prompt_index, r.sample) for r in out.requested] == [
        (i, n) for i in range(20) for n in range(3)
    ]
    numbers = {r.trajectory.seed: int(r.trajectory.text) for g in everything.groups for r in g.rollouts}
    of_reward = [record.dropped == "reward" for record in out.requested]
    assert of_reward == [numbers[record.seed] % 3 == 0 for record in out.requested]
    lone = [group[0].trajectory.seed for group in left if len(group) == 1]
    assert [record.seed for record in out.requested if record.dropped == "group"] == lone != []
    kept = [(r.trajectory.seed, r.sample) for group in out.groups for r in group.rollouts]
    assert [(record.seed, record.sample) for record in out.requested if record.dropped is None] == kept
    assert out.counts["rollout/dropped_rollouts"] == sum(3 - len(group) for group in left) > 0
    assert out.counts["rollout/dropped_groups"] == sum(len(group) < 2 for group in left) > 0
    with raises(RewardError, "reward-failed"):
        sample(rewards=FakeRewards(drop=1))


def test_dynamic_sampling_fills_the_step_with_kept_groups():
    engine = FakeEngine()
    out = step(engine, keep=lambda group: group.prompt.index % 2 == 1)
    assert len(out.groups) == 4 and all(g.prompt.index % 2 for g in out.groups)
    assert out.counts["rollout/resample_rounds"] >= 1
    assert out.counts["rollout/rejected_groups"] == len(engine.requests) - 4
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)
    assert [record.seed for record in out.requested] == seeds
    asked = {(record.prompt_index, record.sample): record.dropped for record in out.requested}
    assert len(asked) == len(seeds) and set(asked.values()) == {"no-signal", None}
    assert all((dropped is None) == (prompt % 2 == 1) for (prompt, _), dropped in asked.items())
    assert max(sample for _, sample in asked) == 2 * out.counts["rollout/resample_rounds"] + 1
    again = step(FakeEngine(), keep=lambda group: group.prompt.index % 2 == 1)
    assert again.groups == out.groups


def test_a_prompt_that_comes_again_in_a_later_round_has_new_seeds():
    engine = FakeEngine()
    seen = []
    step(engine, keep=lambda group: seen.append(group) or len(seen) > 6, prompts=Prompts(4))
    assert len(engine.requests) > 6
    seeds = [seed for request in engine.requests for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)


def test_dynamic_sampling_gives_up_with_the_numbers():
    with raises(RewardError, "equal-rewards"):
        step(FakeEngine(), keep=lambda group: False, max_rounds=3)


class Waiting(FakeEngine):
    """The second group is sampled only when `go_on` is set, or after `abort`."""

    def __init__(self, go_on):
        super().__init__()
        self.go_on, self.aborted = go_on, False

    def finished(self):
        for number, done in enumerate(super().finished()):
            yield done
            if number == 2:
                assert self.go_on.wait(30)
                self.finish_reason = "abort" if self.aborted else self.finish_reason

    def abort(self):
        self.aborted = True
        self.go_on.set()


def test_a_group_is_scored_while_others_are_sampled():
    go_on = threading.Event()

    class Rewards(FakeRewards):
        def score(self, inputs):
            go_on.set()
            return super().score(inputs)

    rewards = Rewards()
    out = sample(Waiting(go_on), rewards)
    assert [g.prompt.index for g in out.groups] == [3, 1] and len(rewards.inputs) == 6


def test_a_reward_that_fails_ends_the_generation():
    class Rewards(FakeRewards):
        def score(self, inputs):
            raise RewardError("row 3: no column", code="wrong-state")

    engine = Waiting(threading.Event())
    with raises(RewardError, "wrong-state"):
        sample(engine, Rewards())
    assert engine.aborted
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards"]


def test_an_engine_that_fails_leaves_no_thread():
    class Broken(FakeEngine):
        def finished(self):
            raise EngineError("no memory", code="wrong-state")

    with raises(EngineError, "wrong-state"):
        sample(Broken())
    until(lambda: not [thread for thread in threading.enumerate() if thread.name == "rewards"])


def test_an_aborted_generation_is_not_scored():
    rewards = FakeRewards()
    out = sample(FakeEngine("abort"), rewards)
    assert out.aborted and out.groups == () and rewards.inputs == []


def test_an_engine_that_mixes_samples_up_is_caught():
    class Moved(FakeEngine):
        def next(self, handle, sample, prompt):
            found = super().next(handle, (sample + 1) % 3, prompt)
            return dataclasses.replace(found, sample=sample)

    class OtherPrompt(FakeEngine):
        def next(self, handle, sample, prompt):
            return super().next(handle, sample, (*prompt, 7))

    class Loses(FakeEngine):
        def finished(self):
            yield next(super().finished())

    with raises(EngineError, "wrong-result") as caught:
        sample(Moved())
    assert "seeds are not the requested ones" in str(caught.value)
    with raises(EngineError, "wrong-result") as caught:
        sample(OtherPrompt())
    assert "another prompt" in str(caught.value)
    with raises(EngineError, "wrong-result") as caught:
        sample(Loses())
    assert "did not return 5 of the requested samples" in str(caught.value)


class Adds(Numbers):
    """Two turns: the policy is told its own token plus one, unless that is even."""

    async def run(self, task, sample):
        trajectory = await sample()
        token = trajectory.token_ids[-1]
        return trajectory if token % 2 == 0 else await sample([token + 1], max_tokens=2)


def test_an_environment_of_two_turns_is_sampled_to_its_end():
    engine = FakeEngine()
    out = sample(engine, prompts=range(4), environment=Adds())
    assert [request.prompt_token_ids for request in engine.requests] == [(i, 1) for i in range(4)]
    for group in out.groups:
        for i, rollout in enumerate(group.rollouts):
            token = sample_seed(5, 2, group.prompt.index, i) % 100
            spans = [(span.author, span.token_ids) for span in rollout.trajectory.spans]
            second = [("tool", (token + 1,)), ("policy", (token,))] if token % 2 else []
            assert spans == [("prompt", (group.prompt.index, 1)), ("policy", (token,)), *second]
            assert rollout.reward == float(token)
    assert {len(r.trajectory.spans) for group in out.groups for r in group.rollouts} == {2, 4}


def test_what_an_environment_may_not_do_is_named():
    class Returns(Numbers):
        async def run(self, task, sample):
            await sample()
            return "done"

    class Sleeps(Numbers):
        async def run(self, task, sample):
            class Other:
                def __await__(self):
                    yield 1

            await Other()

    class RepliesFirst(Numbers):
        async def run(self, task, sample):
            return await sample([1])

    class Raises(Numbers):
        async def run(self, task, sample):
            await sample()
            raise ValueError("the tool broke")

    with raises(EngineError, "wrong-result") as caught:
        sample(environment=Returns())
    assert "returned str" in str(caught.value)
    with pytest.raises(RuntimeError, match="bad yield: 1"):
        sample(environment=Sleeps())
    with raises(EngineError, "wrong-state") as caught:
        sample(environment=RepliesFirst())
    assert "before the first turn" in str(caught.value)
    engine = FakeEngine()
    with pytest.raises(ValueError, match="the tool broke"):
        sample(engine, environment=Raises())
    assert not engine.waiting, "nothing of the call is left"


def test_a_cancelled_step_does_not_start_another_round():
    engine, rewards = FakeEngine(), FakeRewards()
    numbers = Numbers(rewards, Prompts(1000))
    sampler = GroupSampler(engine=engine, environment=numbers, cancelled=lambda: len(rewards.inputs) > 0)
    out = sampler.step(
        SampleKey(run_seed=0, step=0),
        rollout=RolloutConfig(prompts_per_step=4, group_size=2),
        resampling=Resampling(keep=lambda group: False, max_rounds=10),
    )
    assert out.aborted and not out.groups and len(rewards.inputs) == 8


class ThreadRanks:
    """One of several ranks that are threads: what GroupSampler asks of a RankContext."""

    def __init__(self, rank, shared, barrier, store):
        self.rank, self.world_size, self.shared, self.barrier = rank, len(shared), shared, barrier
        self.store, self.calls = store, itertools.count()

    def gather_results(self, make, kind, *, what):
        self.shared[self.rank] = decode_object(encode_object(make(), kind), kind, sender=self.rank)
        self.barrier.wait(timeout=30)
        found = list(self.shared)
        self.barrier.wait(timeout=30)
        return found

    def on_rank_zero(self, make, kind, *, what):
        return self.gather_results(lambda: make() if self.rank == 0 else None, kind | None, what=what)[0]


def on_ranks(size, call):
    """call(ranks) on every one of `size` ranks; their results."""
    shared, barrier, store = [None] * size, threading.Barrier(size), HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, [ThreadRanks(rank, shared, barrier, store) for rank in range(size)]))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_ranks_share_the_prompts_and_all_get_what_one_would(size):
    def samples(ranks):
        engine = FakeEngine()
        sampler = GroupSampler(engine=engine, environment=Numbers(FakeRewards(drop=3)), ranks=ranks)
        found = sampler.groups(
            [make_prompt(i) for i in (3, 1, 8, 5, 2)],
            SampleKey(run_seed=5, step=2),
            sampling=SamplingConfig(max_tokens=4),
            group_size=3,
        )
        return found, [request.prompt_token_ids[0] for request in engine.requests]

    alone = sample(rewards=FakeRewards(drop=3), prompts=(3, 1, 8, 5, 2))
    assert 0 < alone.counts["rollout/dropped_rollouts"] < 15
    found = on_ranks(size, samples)
    for rank, (together, asked) in enumerate(found):
        assert together.groups == alone.groups and together.requested == alone.requested
        for name in ("rollout/dropped_rollouts", "rollout/dropped_groups", "rollout/cached_tokens"):
            assert together.counts[name] == alone.counts[name]
        assert asked == [3, 1, 8, 5, 2][rank::size]


def test_of_ranks_that_run_an_engine_together_the_first_has_its_prompts():
    def own(ranks):
        engine = FakeEngine()
        engine.ranks = 2
        return GroupSampler(engine=engine, environment=Numbers(), ranks=ranks).own(5)

    found = on_ranks(4, own)
    assert [list(numbers) for numbers, _ in found] == [[0, 2, 4], [], [1, 3], []]
    assert {engines for _, engines in found} == {2}


@pytest.mark.parametrize("more", [{"list": [1, {"a": None}]}, {"tuple": (1,)}], ids=["json", "other"])
def test_one_rank_reads_the_rows_of_a_large_set(more):
    """A tuple would arrive as a list: then each rank reads."""

    def samples(ranks):
        read = []

        def make(numbers):
            read.extend(numbers)
            prompts = [dataclasses.replace(make_prompt(n), row={"answer": n, **more}) for n in numbers]
            return [Outcome(item=prompt) for prompt in prompts]

        items = LazyItems(9, make, config=DataConfig(workers=0), selective=False, first=1)
        prompts = FixedPrompts.__new__(FixedPrompts)
        prompts.items = items
        spans = Spans()
        sampler = GroupSampler(
            engine=FakeEngine(), environment=Numbers(prompts=prompts), ranks=ranks, spans=spans
        )
        rollout = RolloutConfig(prompts_per_step=4, group_size=2)
        groups = sampler.step(SampleKey(run_seed=0, step=0), rollout=rollout).groups
        return [group.prompt for group in groups], read, spans.flush()

    first, second = on_ranks(2, samples)
    assert first[0] == second[0] and first[0][0].row.items() >= more.items()
    assert sorted(first[1][1:]) == sorted(prompt.index for prompt in first[0])
    assert second[1][1:] == (first[1][1:] if "tuple" in more else [])
    assert first[2]["time/data"] > 0


@pytest.mark.parametrize(("contract", "taken"), [(None, [3, 2]), ("bits", [4, 1])])
def test_ranks_take_groups_from_one_queue_where_bits_do_not_depend_on_it(contract, taken):
    """Rank 1 stays at its first group until rank 0 has ended."""
    begun, ended = threading.Event(), threading.Event()

    class Paced(FakeEngine):
        def __init__(self, rank):
            super().__init__()
            self.rank, self.contract = rank, contract

        def finished(self):
            if self.rank == 0:
                assert begun.wait(timeout=30)
            begun.set()
            if self.rank == 1 and contract is not None:
                assert ended.wait(timeout=30)
            yield from super().finished()
            ended.set()

    def samples(ranks):
        engine = Paced(ranks.rank)
        sampler = GroupSampler(engine=engine, environment=Numbers(), ranks=ranks, room=1)
        key, sampling = SampleKey(run_seed=5, step=2), SamplingConfig(max_tokens=4)
        found = sampler.groups(
            [make_prompt(i) for i in (3, 1, 8, 5, 2)], key, sampling=sampling, group_size=3
        )
        return found, len(engine.requests)

    alone, found = sample(prompts=(3, 1, 8, 5, 2)), on_ranks(2, samples)
    for together, _ in found:
        assert together.groups == alone.groups and together.requested == alone.requested
    assert [count for _, count in found] == taken


@pytest.mark.parametrize("finish_reason", ["abort", "error"])
def test_a_rank_that_fails_leaves_nothing_in_the_queue(finish_reason):
    class Broken(FakeEngine):
        contract = "bits"

        def finished(self):
            if finish_reason == "error":
                raise EngineError("wrong-state: broken")
            yield from super().finished()

    class OneOfTwo(ThreadRanks):
        def gather_results(self, make, kind, *, what):
            return [make()]

    ranks = OneOfTwo(1, [None] * 2, None, HashStore())
    sampler = GroupSampler(engine=Broken(finish_reason), environment=Numbers(), ranks=ranks, room=1)
    with raises(EngineError, "wrong-state") if finish_reason == "error" else contextlib.nullcontext():
        sampler.groups(
            [make_prompt(i) for i in range(5)],
            SampleKey(run_seed=5, step=2),
            sampling=SamplingConfig(max_tokens=4),
            group_size=3,
        )
    assert SharedQueue(ranks=ranks, name="prompts/0", length=5).take() is None


def test_dynamic_sampling_on_ranks_takes_the_same_rounds():
    def keep(group):
        return group.prompt.index % 3 == 0

    def samples(ranks):
        numbers = Numbers(prompts=Prompts(1000))
        return GroupSampler(engine=FakeEngine(), environment=numbers, ranks=ranks).step(
            SampleKey(run_seed=0, step=0),
            rollout=RolloutConfig(prompts_per_step=4, group_size=2),
            resampling=Resampling(keep=keep, max_rounds=10),
        )

    alone = step(FakeEngine(), keep)
    assert alone.counts["rollout/resample_rounds"] > 1
    for together in on_ranks(3, samples):
        assert together.groups == alone.groups and together.requested == alone.requested
        for name in ("rollout/resample_rounds", "rollout/rejected_groups"):
            assert together.counts[name] == alone.counts[name]


def test_a_generation_that_one_rank_aborts_is_aborted_on_all():
    def samples(ranks):
        engine = FakeEngine(finish_reason="abort" if ranks.rank == 1 else "length")
        return GroupSampler(engine=engine, environment=Numbers(), ranks=ranks).groups(
            [make_prompt(i) for i in range(4)],
            SampleKey(run_seed=5, step=2),
            sampling=SamplingConfig(max_tokens=4),
            group_size=2,
        )

    assert all(found.aborted and found.groups == () for found in on_ranks(2, samples))


def test_an_abort_between_two_turns_ends_every_trajectory():
    """The engine has nothing running when the abort comes, and would go on with the next turns."""
    asked = []

    class Odd(FakeEngine):
        def next(self, handle, sample, prompt):
            asked.append(prompt)
            return super().next(handle, sample, prompt)

        def abort(self):
            asked.append("abort")

    class Replies(Numbers):
        async def run(self, task, sample):
            await sample(max_tokens=1)
            return await sample([1], max_tokens=1)

    # Cancelled once three of the twelve first turns have ended.
    sampler = GroupSampler(engine=Odd(), environment=Replies(), cancelled=lambda: len(asked) >= 3)
    key, sampling = SampleKey(run_seed=5, step=2), SamplingConfig(max_tokens=4)
    out = sampler.groups([make_prompt(i) for i in range(4)], key, sampling=sampling, group_size=3)
    assert out.aborted and out.groups == ()
    assert asked.count("abort") == 1
    assert [len(prompt) for prompt in asked if prompt != "abort"] == [2] * 12 + [4] * 2, (
        "no turn begins after the abort; the two that had begun before it end"
    )


def test_a_turn_that_the_environment_limits_is_no_truncation_and_may_be_short():
    class Short(Numbers):
        async def run(self, task, sample):
            return await sample(max_tokens=1)

    engine = FakeEngine()
    sampler = GroupSampler(engine=engine, environment=Short())
    key, sampling = SampleKey(run_seed=5, step=2), SamplingConfig(max_tokens=8, min_tokens=3)
    found = sampler.groups([make_prompt(1)], key, sampling=sampling, group_size=2)
    assert [rollout.trajectory.finish_reason for rollout in found.groups[0].rollouts] == ["stop", "stop"]
    assert [(r.sampling.min_tokens, r.sampling.max_tokens) for r in engine.requests] == [(1, 1)]
    assert {r.trajectory.finish_reason for group in sample().groups for r in group.rollouts} == {"length"}


@pytest.mark.parametrize("scores", [[], [[1.0]], [[1.0] * 3, [1.0] * 2]])
def test_scores_that_are_not_one_for_each_trajectory_are_refused(scores):
    class Wrong(Numbers):
        def score(self, groups):
            return scores

    with raises(RewardError, "wrong-result"):
        sample(environment=Wrong())
