"""Train backends: each owns the policy's Parameters, their float32 master copy, the optimizer and the
schedule."""
