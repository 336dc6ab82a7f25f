"""A loop of your own: the page of `lockstep/loops/rl.py` without `Run`, which keeps folder, checkpoints and
metrics. This one trains on the harder half of the groups.

python examples/own_loop.py                     # random weights, seconds
python examples/own_loop.py demo                # SmolLM2-135M, minutes
"""

import statistics
import sys

from lockstep import Builder, load_run
from lockstep.loop.metrics import rollout_metrics
from lockstep.loop.policy import estimate
from lockstep.schema.batch import rollout_samples


def main(recipe: str = "tiny", steps: int = 5) -> list[float]:
    """Mean reward of each step."""
    rewards = []
    with Builder(load_run(recipe)) as build:
        environment = build.environment()  # tasks and rewards
        algorithm = build.algorithm()  # advantages and loss
        policy = build.policy(algorithm)  # what is trained
        reference, _ = build.roles(policy, environment, algorithm)  # None where no KL term is
        engine = build.engine(policy)  # what samples
        rollouts = build.rollouts(engine, environment, algorithm)

        engine.load(policy, version=0)
        for step in range(steps):
            groups = rollouts.sample(step).groups
            means = [statistics.fmean(rollout.reward for rollout in group.rollouts) for group in groups]
            median = statistics.median(means)
            hard = [group for group, mean in zip(groups, means, strict=True) if mean <= median]

            samples = rollout_samples(r.trajectory for group in hard for r in group.rollouts)
            ref_logprobs = reference.logprobs(samples) if reference else None
            estimates = estimate(algorithm, hard, samples, ref_logprobs=ref_logprobs)
            minibatches = policy.pack(step, samples, estimates, algorithm, ref_logprobs=ref_logprobs)
            updates = [policy.update(batches, minibatches.loss) for batches in minibatches]
            metrics = rollout_metrics(estimates.groups) | policy.metrics(minibatches, updates)
            engine.load(policy, version=step + 1)

            rewards.append(statistics.fmean(means))
            print(
                f"step {step + 1}: reward {rewards[-1]:.3f}, trained on {len(hard)} of {len(groups)} groups, "
                f"grad norm {metrics['grad_norm']:.3f}, entropy {metrics['entropy']:.3f}"
            )
        policy.backend.export(build.config.run_dir or "own-loop-export")
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
