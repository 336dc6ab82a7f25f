"""GRPO and its family, and PPO. One step: sample, score, estimate advantages, update, load the new weights.

    tasks ──► environment ⇄ engine ──► groups, rewards ──► samples ──► advantages ──► micro-batches
      ▲                                                                                   │
      └── engine.load(policy) ◄── optimizer steps ◄── loss, backward ◄────────────────────┘

`Run` is everything around the loop: folder, checkpoints, metrics, display, signals. `Builder` makes the parts
that the config names. `examples/own_loop.py` is this page without `Run`. To change a step, copy the page:

- `environment.tasks(step, n, seed)` gives the tasks of a step, `held_out(n)` those of evaluations. A task is
  a `Prompt`: `token_ids`, `text`, `row`. Other data, turns or rewards are a subclass of
  `lockstep.Environment`; to choose among the config's tasks, replace `environment.tasks` once it is built.
- `sampled.groups[i]` is a task, `prompt`, with its `rollouts`; `samples` are these as documents of L tokens,
  prompt and completion. `sample.loss_mask` is True where the next token is the policy's own, and
  `sample.num_trained` counts those. `sample.rollout_logprobs`, `ref_logprobs[i]` and
  `estimates.advantages[i]`, [L] float32, belong to the same tokens. Advantages may be changed in place
  before `policy.pack`.
- `metrics` takes any name with a number, for metrics.jsonl, TensorBoard and wandb. Variables of your own are
  in no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Unpack

from lockstep.config.run import GRPORun
from lockstep.loop.build import Builder, describe
from lockstep.loop.evaluate import evaluation_of
from lockstep.loop.metrics import remote_role_metrics, rollout_metrics
from lockstep.loop.policy import estimate
from lockstep.loop.run import Run, Start
from lockstep.rollout.environment import Environment
from lockstep.schema.batch import rollout_samples


def train(
    config: GRPORun,
    *,
    rewards: Sequence[Callable[..., Any]] = (),
    environment: Environment | None = None,
    **start: Unpack[Start],
) -> dict[str, Any]:
    """Train a policy with RL; returns the run's summary. `lockstep.train_online` checks the config first.

    Args:
        rewards: Python callables that replace `config.rewards`, called as f(prompt=, completion=, row=).
        environment: takes the place of the config's data and rewards.
        start: resume, checkpoint, restart, ranks.
    """
    with Run.open(config, **start) as run, Builder.of(run) as build:
        environment = build.environment(environment, rewards=rewards)  # checked before weights are read
        algorithm = build.algorithm()  # advantages and loss
        policy = build.policy(algorithm)  # local, fsdp2 or deepspeed
        # The reference is None unless algorithm.kl.coef > 0 (1e-12 loads one at a negligible penalty); only
        # PPO has a critic.
        reference, critic = build.roles(policy, environment, algorithm)
        engine = build.engine(policy)  # hf, native, vllm or sglang: token ids in, token ids and logprobs out
        rollouts = build.rollouts(engine, environment, algorithm)
        describe(run, build, environment=environment, policy=policy, engine=engine)
        run.restore(policy, critic, algorithm, rollouts)  # from the checkpoint to go on from, if there is one

        engine.load(policy, version=run.first_step)
        for step, sampled in run.steps(rollouts, evaluate=evaluation_of(run, engine, environment)):
            samples = rollout_samples(r.trajectory for group in sampled.groups for r in group.rollouts)
            values = critic.begin_score(samples) if critic else None  # beside the reference, if it can
            ref_logprobs = reference.logprobs(samples) if reference else None
            estimates = estimate(algorithm, sampled.groups, samples, values=values, ref_logprobs=ref_logprobs)
            critic_update = critic.begin_update(samples, estimates) if critic else dict
            minibatches = policy.pack(step, samples, estimates, algorithm, ref_logprobs=ref_logprobs)
            run.write_rollouts(step, estimates.groups)  # in a thread, while the GPU trains the policy
            updates = [policy.update(batches, minibatches.loss) for batches in minibatches]
            metrics = rollout_metrics(estimates.groups) | policy.metrics(minibatches, updates)
            metrics |= {
                **estimates.metrics,
                **critic_update(),
                **remote_role_metrics(build.role_workers, ranks=run.ranks),
            }
            engine.load(policy, version=step + 1)
            run.log(step, metrics)
        return run.finish()
