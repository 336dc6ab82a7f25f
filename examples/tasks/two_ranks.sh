# Train on two ranks, and go on in one process.
# Pages: README.md, docs/how-to/several-gpus.md
set -eu
lockstep train grpo --recipe tiny --steps 2 --ranks 2 --train.backend fsdp2 --run-dir runs/two
lockstep train --resume runs/two --steps 3 --train.backend local
