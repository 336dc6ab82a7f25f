# A loop of your own over the parts of a run: it trains on the groups that are hard.
# Pages: docs/how-to/own-loop.md
set -eu
cat > loop.py <<'END'
from lockstep import Builder, load_run
from lockstep.loop.policy import estimate
from lockstep.schema.batch import rollout_samples

with Builder(load_run("tiny")) as build:
    environment = build.environment()
    algorithm = build.algorithm()
    policy = build.policy(algorithm)
    build.roles(policy, environment, algorithm)  # reference and critic, where the algorithm has them
    engine = build.engine(policy)
    rollouts = build.rollouts(engine, environment, algorithm)

    engine.load(policy, version=0)  # the engine samples from the policy's weights
    for step in range(3):
        groups = rollouts.sample(step).groups  # tasks -> trajectories -> rewards
        hard = [g for g in groups if min(r.reward for r in g.rollouts) < 0.9]
        samples = rollout_samples(r.trajectory for g in hard for r in g.rollouts)
        estimates = estimate(algorithm, hard, samples)  # advantages
        minibatches = policy.pack(step, samples, estimates, algorithm)  # micro-batches of each optimizer step
        updates = [policy.update(batches, minibatches.loss) for batches in minibatches]
        engine.load(policy, version=step + 1)
        rewards = [r.reward for g in groups for r in g.rollouts]
        print(step, sum(rewards) / len(rewards), updates[-1]["grad_norm"])
    policy.backend.export("export")
END
python loop.py
