"""Your own loop over the parts: sample, look, update, push. Here the easiest groups are left out.

python examples/own_loop.py                     # random weights, seconds
python examples/own_loop.py demo                # SmolLM2-135M, minutes
"""

import statistics
import sys

from lockstep import OnlineTrainer, build_online, load_run


def main(recipe: str = "tiny", steps: int = 5) -> list[float]:
    """Mean reward of each step."""
    parts = build_online(load_run(recipe))
    trainer = OnlineTrainer(parts)
    trainer.push(policy_version=0)
    rewards = []
    for step in range(steps):
        groups = trainer.sample(step).groups
        means = [statistics.fmean(rollout.reward for rollout in group.rollouts) for group in groups]
        kept = [group for group, mean in zip(groups, means, strict=True) if mean <= statistics.median(means)]
        result = trainer.update(kept, step=step)
        trainer.push(policy_version=step + 1)
        rewards.append(statistics.fmean(means))
        print(
            f"step {step + 1}: reward {rewards[-1]:.3f}, trained on {len(kept)} of {len(groups)} groups, "
            f"grad norm {result.metrics['grad_norm']:.3f}, entropy {result.metrics['entropy']:.3f}"
        )
    parts.backend.export(parts.run.run_dir or "own-loop-export")
    parts.close()
    return rewards


if __name__ == "__main__":
    main(*sys.argv[1:2])
