# Train on pairs of a better and a worse answer.
# Pages: docs/how-to/preferences.md, docs/how-to/rejection-sampling.md (a tiny model that reads text)
set -eu
python examples/tiny_text_model.py model

for n in $(seq 16); do
    echo "{\"prompt\": \"What is $n + 7?\", \"chosen\": \"It is $((n + 7)).\", \"rejected\": \"I do not know.\"}"
done > pairs.jsonl
tail -n 4 pairs.jsonl > held_out.jsonl

cat > run.toml <<'END'
kind = "dpo"
steps = 4
batch_size = 8         # pairs

[model]
name = "./model"

[data]
source = "pairs.jsonl"
size = 12

[eval_data]
source = "held_out.jsonl"

[algorithm]
name = "dpo"           # or robust_dpo, ipo, simpo, orpo, kto
beta = 0.1

[train]
lr = 1e-3
END

lockstep train run.toml --run-dir runs/dpo
