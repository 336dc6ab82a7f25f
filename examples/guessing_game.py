"""An environment in gym form: guess a number from 1 to 32 within six turns."""

import math
import random
import re


class Guess:
    """`reset` returns the first observation, `step` the next one, its reward, and whether it was the last."""

    def reset(self, game: int | None = None) -> str:
        """Choose a number: of 32 games in a row, each has another one."""
        self.number = (random.randrange(32) if game is None else game) % 32 + 1
        self.low, self.high, self.turns, self.solved = 1, 32, 0, False
        return "Guess my number, from 1 to 32."

    def step(self, action: str) -> tuple[str, float, bool]:
        """Compare the last number that the policy wrote."""
        self.turns += 1
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        if guess is None:
            return "Write a number.", 0.0, self.turns == 6
        if guess == self.number:
            self.low = self.high = guess
            self.solved = True
            return "Right!", 1.0, True
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "Too low.", 0.0, self.turns == 6
        self.high = min(self.high, guess - 1)
        return "Too high.", 0.0, self.turns == 6


class Narrowed(Guess):
    """The same game, which also rewards what the guesses have found out: a denser reward to learn from."""

    def get_reward(self) -> dict[str, float]:
        """`found` is 1 when the number is known to the player, less by a fifth for each bit that is missing."""
        left = self.high - self.low + 1
        return {"solved": float(self.solved), "found": 1 - math.log2(left) / 5}
