"""Crashes, and refusals without a fault: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""


# 14. LoRA targets

# end of 14


# 15. Token ids beyond the embedding

# end of 15


# 16. Full disks, own functions and huge rewards

# end of 16


# 17. Batch sizes of KTO

# end of 17


# 18. Small sets, and all faults at once

# end of 18


# 19. Own rows without rewards

# end of 19


# 20. Templates that end a conversation with eos

# end of 20


# 21. Failed starts leave no run directory

# end of 21


# 22. Names that nearly match

# end of 22


# 23. Exit codes

# end of 23


# 24. Values, lines and lengths in messages

# end of 24


# 25. Submit, the environment of ranks, and cluster.md

# end of 25


# 36. The lowest supported Python

# end of 36


# 37. File descriptors under attack

# end of 37


# 38. Matrix on inputs without a signal

# end of 38
