# A reward model on pairs of answers, then PPO with its scores.
# Pages: docs/how-to/reward-model.md, docs/how-to/rejection-sampling.md (a tiny model that reads text)
set -eu
python examples/tiny_text_model.py model

for n in $(seq 16); do
    echo "{\"prompt\": \"What is $n + 7?\", \"chosen\": \"It is $((n + 7)).\", \"rejected\": \"I do not know.\"}"
done > pairs.jsonl

cat > rm.toml <<'END'
kind = "rm"
steps = 3
batch_size = 8         # pairs

[model]
name = "./model"

[data]
source = "pairs.jsonl"

[train]
lr = 1e-3
END

cat > ppo.toml <<'END'
kind = "ppo"
steps = 2
rewards = []           # left out: the default verifier scores beside it

[model]
name = "./model"

[reward_model]
name = "runs/rm/export"

[data]
source = "pairs.jsonl" # its prompts

[rollout]
prompts_per_step = 2
group_size = 2

[rollout.sampling]
max_tokens = 8

[eval]
num_prompts = 4
END

lockstep train rm.toml --run-dir runs/rm
lockstep train ppo.toml --value.name runs/rm/export --run-dir runs/ppo
