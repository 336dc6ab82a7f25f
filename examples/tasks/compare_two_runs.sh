# Two runs that differ in one setting: what differs, and the mean reward of each step side by side.
# Pages: docs/tutorial/session.md (train), docs/how-to/parity.md (parity compare)
set -eu
lockstep train grpo --recipe tiny --steps 4 --run-dir runs/a
lockstep train grpo --recipe tiny --steps 4 --train.lr 1e-3 --run-dir runs/b
diff runs/a/config.toml runs/b/config.toml || true
lockstep parity compare runs/a runs/b --key reward/mean || echo "exit status $?"
