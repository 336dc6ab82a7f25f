"""Engine `hf`: a decode loop of ours over the trainer's own transformers model."""
