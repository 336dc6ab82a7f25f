"""Attacks and faults: inputs of users, what should happen, and who says so.

Each case is a row: input, expected value, and the source of the expected value.
"""


# 26. The address of a local cluster

# end of 26


# 27. The state of a step's boundary

# end of 27


# 28. Restarting a run that cannot be resumed

# end of 28


# 29. The process that a file names

# end of 29


# 30. Lengths of requests

# end of 30


# 31. Ledger, metrics and rollouts

# end of 31


# 32. Shared memory and flight files

# end of 32


# 33. Secrets

# end of 33


# 34. An engine server killed under two ranks

# end of 34


# 35. Settled by a test

# end of 35
