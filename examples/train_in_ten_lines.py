"""GRPO in ten lines.

python examples/train_in_ten_lines.py           # random weights, seconds
python examples/train_in_ten_lines.py demo      # SmolLM2-135M, about ten minutes on two CPU cores
"""

import sys

from lockstep import load_run, train_online

run = load_run(sys.argv[1] if len(sys.argv) > 1 else "tiny", kind="grpo", overrides={"seed": 1})
summary = train_online(run)
before, after = summary["eval_before"], summary["eval_after"]
print(f"{summary['outcome']} after {summary['steps']} steps: {summary['run_dir']}")
print(f"held-out mean reward {before['mean_reward']:.2f} -> {after['mean_reward']:.2f}")
