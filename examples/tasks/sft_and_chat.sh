# Train on conversations, then talk to the result.
# Pages: docs/how-to/own-data.md (documents), docs/reference/cli.md (lockstep chat),
#        docs/how-to/rejection-sampling.md (a tiny model that reads text)
set -eu
python examples/tiny_text_model.py model

for n in $(seq 16); do
    echo "{\"messages\": [{\"role\": \"user\", \"content\": \"$n?\"}, {\"role\": \"assistant\", \"content\": \"yes\"}]}"
done > conversations.jsonl

cat > run.toml <<'END'
kind = "sft"
steps = 25
batch_size = 16

[model]
name = "./model"
dtype = "float32"

[data]
source = "conversations.jsonl"
max_length = 1024

[train]
lr = 0.02
END

lockstep train run.toml --run-dir runs/sft
echo "3?" | lockstep chat runs/sft --temperature 0
