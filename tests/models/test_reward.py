import pytest
import torch
from classifiers import save_classifier
from raising import raises
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from lockstep.config.batch import RewardModelConfig
from lockstep.errors import DataError, ModelError
from lockstep.models.reward import RewardModel, length_batches

PAIRS = [
    ("short", "a"),
    ("a longer question than that", "and a longer answer too"),
    ("x", ""),
    ("mid size", "yes"),
]


def saved(folder, tiny, *, labels=1, pad=0, template=True):
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    if not template:
        tokenizer.chat_template = None
    return save_classifier(
        folder, tokenizer, num_labels=labels, pad_token_id=pad, max_position_embeddings=128
    )


def loaded(folder, **more):
    config = RewardModelConfig(name=str(folder), dtype="float32", **more)
    return RewardModel(config, device=torch.device("cpu"))


def directly(folder, texts):
    """One text at a time, by transformers alone."""
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            module(
                input_ids=torch.tensor([tokenizer(t, add_special_tokens=False)["input_ids"]])
            ).logits.item()
            for t in texts
        ]


@pytest.mark.parametrize("pad", [0, None, 2])
@pytest.mark.parametrize("budget", [1, 60, 9999])
def test_scores_are_those_of_transformers_in_any_batch(tmp_path, tiny_folder, pad, budget):
    folder = saved(tmp_path / "model", tiny_folder, pad=pad)
    model = loaded(folder, token_budget=budget)
    documents = [model.document(p, c, "row") for p, c in PAIRS]
    texts = [f"<|user|>{p}<|end|><|assistant|>{c}<|end|>" for p, c in PAIRS]
    wanted = directly(folder, texts)
    assert model.score(documents) == pytest.approx(wanted, abs=1e-5)
    assert len({round(w, 3) for w in wanted}) == 4


def test_a_model_without_a_template_reads_plain_text(tmp_path, tiny_folder):
    folder = saved(tmp_path / "model", tiny_folder, template=False)
    model = loaded(folder)
    documents = [model.document(p, c, "row") for p, c in PAIRS]
    assert model.score(documents) == pytest.approx(directly(folder, [p + c for p, c in PAIRS]), abs=1e-5)
    with raises(DataError, "no-chat-template"):
        model.document([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}], "c", "row 3")


def test_what_is_no_reward_model_is_refused(tmp_path, tiny_folder):
    with raises(ModelError, "wrong-shape"):
        loaded(saved(tmp_path / "three", tiny_folder, labels=3))
    with raises(ModelError, "wrong-shape"):
        loaded(tiny_folder)  # a causal LM
    from safetensors.torch import load_file, save_file

    folder = saved(tmp_path / "headless", tiny_folder)
    weights = load_file(folder / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with raises(ModelError, "wrong-shape"):
        loaded(folder)


def test_long_texts_are_refused_or_cut_at_the_left(tmp_path, tiny_folder):
    folder = saved(tmp_path / "model", tiny_folder)
    with raises(DataError, "too-long"):
        loaded(folder).document("x" * 200, "yes", "row 7")
    cut = loaded(folder, overlong="truncate_left", max_length=20).document("x" * 200, "yes", "row 7")
    assert cut.truncated and len(cut.ids) == 20
    with raises(ModelError, "out-of-range: reward_model.max_length"):
        loaded(folder, max_length=129)


def test_batches_hold_similar_lengths_within_the_budget():
    assert length_batches([2, 5, 3, 2], budget=6) == [[1], [2, 0], [3]]
    assert length_batches([9], budget=1) == [[0]]
    assert length_batches([], budget=1) == []
