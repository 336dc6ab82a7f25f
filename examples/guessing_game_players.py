"""A tiny model of numbers and few words, games of mediocre players for its warm start, and rows to play on.

python guessing_game_players.py FOLDER      writes the model: random weights and a tokenizer
"""

import random
import sys
from pathlib import Path
from typing import Any

from guessing_game import Guess

MISTAKES = 0.4
"""Share of guesses at which a player has lost the thread, and names any number."""
WORDS = "Guess my number, from 1 to 32. Too low. high. Write a number."
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<policy>' + m.content + '<end>' if m.role == 'assistant' else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<policy>{% endif %}"
)


def rows() -> list[dict[str, Any]]:
    """Return the games to play. The environment writes all that the policy reads."""
    return [{"prompt": "", "game": game} for game in range(32 * 132)]


def games(count: int = 16_000, seed: int = 0) -> list[dict[str, Any]]:
    """Return conversations of players who halve what is left, except for MISTAKES."""
    draw = random.Random(seed)
    return [{"messages": _game(draw)} for _ in range(count)]


def _game(draw: random.Random) -> list[dict[str, str]]:
    game, over = Guess(), False
    messages = [{"role": "user", "content": game.reset(draw.randrange(32))}]
    while not over:
        lost = draw.random() < MISTAKES
        guess = str(draw.randint(1, 32) if lost else (game.low + game.high) // 2)
        reply, _, over = game.step(guess)
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": reply}]
    return messages[:-1]


def save(folder: Path, *, width: int = 64, layers: int = 2) -> Path:
    """Write config, weights and tokenizer; returns the folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from lockstep.models.shapes import random_model

    special = ["<pad>", "<begin>", "<end>", "<policy>"]
    words = dict.fromkeys([*special, *map(str, range(1, 33)), *WORDS.split(), "?"])
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<begin>",
        eos_token="<end>",
        additional_special_tokens=["<policy>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        initializer_range=0.05,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    model = random_model(config, seed=0, dtype=torch.float32, device=torch.device("cpu"), attention="sdpa")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    print(save(Path(sys.argv[1])))
