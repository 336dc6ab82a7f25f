"""The compatibility matrix: the same inputs under every combination of some axes."""
