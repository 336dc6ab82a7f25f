# GRPO on your own problems with your own reward.
# Pages: docs/how-to/own-data.md (the rows and [data]), docs/how-to/own-reward.md (the function and [[rewards]]),
#        docs/how-to/rejection-sampling.md (a tiny model that reads text)
set -eu
python examples/tiny_text_model.py model

for n in $(seq 40); do
    echo "{\"problem\": \"What is $n + 1?\", \"solution\": \"$((n + 1))\"}"
done > problems.jsonl

cat > my_rewards.py <<'END'
import re


def closeness(*, prompt, completion, row):
    numbers = re.findall(r"-?\d+", completion)
    return 1 / (1 + abs(int(numbers[-1]) - int(row["answer"]))) if numbers else 0.0
END

cat > run.toml <<'END'
kind = "grpo"
steps = 2

[model]
name = "./model"

[data]
source = "problems.jsonl"
prompt_column = "problem"
answer_column = "solution"
prompt_template = "{prompt} Answer with a number."

[rollout]
prompts_per_step = 2
group_size = 4

[rollout.sampling]
max_tokens = 8

[[rewards]]
name = "my_rewards:closeness"

[[rewards]]
name = "format"
weight = 0.2
kwargs = { pattern = "^-?[0-9]+$" }

[eval]
num_prompts = 8
END

lockstep train run.toml --run-dir runs/own-reward
