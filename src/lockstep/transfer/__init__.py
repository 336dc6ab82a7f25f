"""From trainer to engine: how weights travel."""
