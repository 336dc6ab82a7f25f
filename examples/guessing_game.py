"""An environment in gym form: guess a number from 1 to 32 within six turns."""

import random
import re


class Guess:
    """`reset` returns the first observation, `step` the next one, its reward, and whether it was the last."""

    def reset(self, number: int | None = None) -> str:
        """Choose a number, unless the row has one."""
        self.number, self.turns = number or random.randint(1, 32), 0
        return "Guess my number, from 1 to 32."

    def step(self, action: str) -> tuple[str, float, bool]:
        """Compare the last number that the policy wrote."""
        self.turns += 1
        numbers = re.findall(r"\d{1,9}", action)
        guess = int(numbers[-1]) if numbers else None
        if guess == self.number:
            return "Right!", 1.0, True
        reply = "Write a number." if guess is None else "Too low." if guess < self.number else "Too high."
        return reply, 0.0, self.turns == 6
