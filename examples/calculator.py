"""An environment of tools: a calculator, and the product of two numbers to find with it."""


class Calculator:
    """One instance for each sample; every public typed method with a docstring is a tool."""

    def reset(self, a: int, b: int) -> str:
        """Keep the answer; the text is added to the prompt."""
        self.product, self.shown = a * b, None
        return f"What is {a} * {b}?"

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.shown = a * b
        return self.shown

    def get_reward(self) -> float:
        """1 if the calculator has shown the answer."""
        return float(self.shown == self.product)
