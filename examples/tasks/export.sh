# Load what a run exports with transformers, and sample from it with Lockstep.
# Pages: docs/tutorial/session.md (train, sample), docs/how-to/resume-and-checkpoints.md (export)
set -eu
lockstep train grpo --recipe tiny --steps 1 --run-dir runs/export
lockstep sample runs/export --num-prompts 1 --n 2 --max-tokens 6
python -c "
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained('runs/export/export')
print(f'{model.num_parameters():,} parameters, {model.dtype}')
"
