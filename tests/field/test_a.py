"""Wrong results that nothing reported: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""


# 1. The tools and chat_template_kwargs of a row

# end of 1


# 2. Nulls that Arrow adds

# end of 2


# 3. Special tokens in the text that rewards and stops see

# end of 3


# 4. The end-of-sequence token after a special token

# end of 4


# 5. Adapter_config.json beside a model's weights

# end of 5


# 6. Assistant turns of the prompt

# end of 6


# 7. The BOS token after truncation

# end of 7


# 8. A token across the border of prompt and completion

# end of 8


# 9. Columns that a setting names

# end of 9


# 10. Pairs with different prompts

# end of 10


# 11. The token budget of evaluations

# end of 11


# 12. Lockstep hang on a living run

# end of 12


# 13. Mismatched answers of KTO

# end of 13
