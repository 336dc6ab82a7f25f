"""What a run shows and keeps: run directory, metrics, spans, display. Takes plain values, knows no config."""
