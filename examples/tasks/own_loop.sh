# A loop of your own over the parts of a run: it trains on the groups that are hard.
# Pages: docs/how-to/own-loop.md
set -eu
cat > loop.py <<'END'
from lockstep import OnlineTrainer, build_online, load_run

parts = build_online(load_run("tiny"))
trainer = OnlineTrainer(parts)
trainer.push(policy_version=0)  # the engine samples from the trainer's weights
for step in range(3):
    groups = trainer.sample(step).groups  # prompts -> completions -> rewards
    hard = [g for g in groups if min(r.reward for r in g.rollouts) < 0.9]
    result = trainer.update(hard, step=step)  # advantages -> packs -> loss, backward, optimizer
    trainer.push(policy_version=step + 1)
    print(step, result.metrics["reward/mean"], result.metrics["grad_norm"])
parts.backend.export("export")
parts.close()
END
python loop.py
