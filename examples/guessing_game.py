"""An environment in gym form: guess a number from 1 to 32 within six turns."""

import math
import random
import re


class Guess:
    """`reset` returns the first observation, `step` the next one, its reward, and whether it was the last."""

    def reset(self, game: int | None = None) -> str:
        """Choose a number: of 32 games in a row, each has another one."""
        self.number = (random.randrange(32) if game is None else game) % 32 + 1
        self.low, self.high, self.turns = 1, 32, 0
        return "Guess my number, from 1 to 32."

    def step(self, action: str) -> tuple[str, float, bool]:
        """Compare the last number that the policy wrote."""
        self.turns += 1
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.number:
            return "Right!", 1.0, True
        if guess is None:
            return "Write a number.", 0.0, self.turns == 6
        if guess < self.number:
            self.low = max(self.low, guess + 1)
            return "Too low.", 0.0, self.turns == 6
        self.high = min(self.high, guess - 1)
        return "Too high.", 0.0, self.turns == 6


class Narrowed(Guess):
    """The same game, with a denser reward: what the guesses have found out counts, too."""

    solved = 0.0

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Remember whether the guess was right. Async methods allow all games to share a process."""
        reply, self.solved, over = super().step(action)
        return reply, self.solved, over

    def get_reward(self) -> dict[str, float]:
        """Return 1 if the game is solved, and the share of the five bits of the number that are known."""
        bits = 5 * self.solved or 5 - math.log2(self.high - self.low + 1)
        return {"solved": self.solved, "found": bits / 5}
