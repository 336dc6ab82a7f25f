"""Rollouts that take several steps on several ranks (rollout.max_lag): shares, commits and checkpoints."""

import sys
from pathlib import Path

import pytest
from raising import raises
from sampled import FakeEngine, completion

sys.path.insert(0, str(Path(__file__).parent))

from test_sampler import Numbers, Prompts, make_prompt, on_ranks

from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.errors import CheckpointError
from lockstep.protocols.engine import Finished
from lockstep.rollout.background import Background
from lockstep.rollout.partial import PartialRollouts, Schedule
from lockstep.rollout.sampler import GroupSampler

LAG, PROMPTS = 2, 4
ROLLOUT = RolloutConfig(
    prompts_per_step=PROMPTS, group_size=3, max_lag=LAG, sampling=SamplingConfig(max_tokens=9)
)


class Cut(FakeEngine):
    """Writes 0, 1, 2, ... up to seed % 7, a token of each sample at a time; goes on with what was cut off."""

    partial_rollouts = True

    def __init__(self, version):
        super().__init__()
        self.version, self.cut = version, False

    def finished(self):
        self.cut = False
        written = [
            [span.policy_version for span in begun for _ in span.token_ids]
            for handle, i, _ in self.waiting
            for begun in [handle.request.begun[i] if handle.request.begun else ()]
        ]
        running = [(*one[:2], versions) for one, versions in zip(self.waiting, written, strict=True)]
        self.waiting = []
        while running:
            for one in list(running):
                handle, i, versions = one
                ends = handle.request.seeds[i] % 7 + 1
                if not self.cut:
                    versions.append(self.version)
                if self.cut or len(versions) == ends:
                    running.remove(one)
                    yield Finished(handle=handle, sample=i, completion=self.made(handle.request, i, versions))

    def made(self, request, i, versions):
        counts = tuple((v, versions.count(v)) for v in sorted(set(versions)))
        return completion(
            request.prompt_token_ids,
            range(len(versions)),
            finish_reason="abort" if self.cut else "stop",
            text="1",
            seed=request.seeds[i],
            policy_version=versions[-1] if versions else self.version,
            versions=counts if len(counts) > 1 else (),
        )

    def abort(self):
        self.cut = True


def steps(size, first, last, states=(), lag=LAG):
    """On each of `size` ranks: the groups of these steps, the state before them and the state after them."""

    def run(ranks):
        engine = Cut(first)
        sampler = GroupSampler(engine=engine, environment=Numbers(prompts=Prompts(1000)), ranks=ranks)
        rollout = ROLLOUT.model_copy(update={"max_lag": lag})
        partial = PartialRollouts(sampler, rollout=rollout, run_seed=0, steps=6)
        partial.restore(states)
        before, found = partial.state(), []
        for engine.version in range(first, last):
            found.append(partial.step(engine.version).groups)
            partial.commit()
        return found, before, partial.state()

    return on_ranks(size, run)


def samples(groups_of_steps, first=0):
    """(step, prompt, sample) -> trajectory."""
    return {
        (step, group.prompt.index, rollout.sample): rollout.trajectory
        for step, groups in enumerate(groups_of_steps, first)
        for group in groups
        for rollout in group.rollouts
    }


def test_ranks_train_on_the_same_rollouts_in_order():
    found = [samples(groups) for groups, *_ in steps(2, 0, 6)]
    assert found[0] == found[1] and len(found[0]) == 6 * PROMPTS * 3
    for (step, *_), one in found[0].items():
        assert one.added_token_ids == tuple(range(one.seed % 7 + 1))
        assert max(0, step - LAG) <= one.policy_version and max(one.policy_versions) <= step
    assert any(step - one.policy_version == LAG for (step, *_), one in found[0].items())
    assert any(len(one.policy_versions) > 1 for one in found[0].values())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_ranks_goes_on_with_what_was_begun(size):
    straight = samples(steps(2, 0, 6)[0][0][2:], 2)
    states = [after for *_, after in steps(2, 0, 2)]
    again = steps(size, 2, 6, states)
    kept = sorted(number for _, before, _ in again for number in before.share.numbers)
    assert kept == sorted(number for state in states for number in state.share.numbers) != []
    assert all(found == again[0][0] for found, *_ in again)
    found = samples(again[0][0], 2)
    assert {key: one.token_ids for key, one in found.items()} == {
        key: one.token_ids for key, one in straight.items()
    }
    shares = [state.received({n: make_prompt(n) for n in state.share.numbers}) for state in states]
    begun = {
        (number // PROMPTS, number, rollout.sample): rollout.trajectory.begun
        for share in shares
        for number, rollouts in zip(share.numbers, share.rollouts, strict=True)
        for rollout in rollouts
    }
    assert any(begun.values())
    assert all(found[key].begun[: len(spans)] == spans for key, spans in begun.items())
    if size == 2:
        assert found == straight


def test_what_was_begun_under_a_longer_lag_is_refused():
    states = [after for *_, after in steps(1, 0, 2, lag=4)]
    with raises(CheckpointError, "not-resumable: rollout.max_lag = 1"):
        steps(1, 2, 3, states, lag=1)


class Remembering(Numbers):
    """Scores a trajectory by what it remembers of it, and forgets that."""

    goes_on = True

    def __init__(self):
        super().__init__(prompts=Prompts(1000))
        self.remembered = set()

    async def run(self, task, sample):
        trajectory = await sample()
        self.remembered.add(sample.seed)
        return trajectory

    def can_score(self, trajectory):
        return trajectory.seed in self.remembered

    def score(self, groups):
        for _, trajectories in groups:
            for one in trajectories:
                self.remembered.remove(one.seed)
        return super().score(groups)


def test_a_group_is_scored_once_though_a_resume_has_to_hear_of_its_ends_again():
    def partial():
        sampler = GroupSampler(engine=Cut(0), environment=Remembering())
        return PartialRollouts(sampler, rollout=ROLLOUT, run_seed=0, steps=6)

    def steps_of(partial, first, last):
        found = []
        for partial._sampler.engine.version in range(first, last):
            found.append(partial.step(partial._sampler.engine.version).groups)
            partial.commit()
        return samples(found, first)

    whole, before = partial(), partial()
    straight = steps_of(whole, 0, 6)
    steps_of(before, 0, 2)
    state = before.state().received({n: make_prompt(n) for n in before.state().share.numbers})
    ended = [[one.trajectory.finish_reason != "abort" for one in group] for group in state.rollouts]
    assert any(all(group) and len(group) == 3 for group in ended)  # nothing of it is sampled again
    resumed = partial()
    resumed.restore([before.state()])
    assert steps_of(resumed, 2, 6) == {key: one for key, one in straight.items() if key[0] >= 2}


def test_what_goes_on_to_a_border_is_not_aborted_while_it_is_waited_for():
    """Ctrl-C comes in the thread that waits."""
    engine = Cut(0)
    engine.cuts_at_borders = True
    sampler = GroupSampler(engine=engine, environment=Numbers(prompts=Prompts(1000)))
    schedule = Schedule(background=True, slots=4)
    partial = PartialRollouts(sampler, rollout=ROLLOUT, run_seed=0, steps=6, schedule=schedule)
    waited = []

    class Waiting(Background):
        def end(self, *, at_once=False):
            waited.append(at_once)
            partial.abort()

    partial._running = Waiting(engine, lambda: None, fixed=True)
    partial._running.enough.set()
    partial.cut()
    assert waited == [False] and not engine.cut
    partial.abort()
    assert engine.cut
