"""GPT-NeoX: attention and MLP beside each other, layer norms, one linear for queries, keys and values."""

from lockstep.models.architectures.record import SIZES, Architecture

ARCHITECTURE = Architecture(
    model_type="gpt_neox",
    title="GPT-NeoX, Pythia",
    reads=(SIZES - {"num_key_value_heads", "rms_norm_eps"})
    | {
        "attention_bias",
        "classifier_dropout",
        "hidden_act",
        "hidden_dropout",
        "layer_norm_eps",
        "num_labels",
        "use_parallel_residual",
    },
    attention_linears=("query_key_value", "dense"),
    mlp_linears=("dense_h_to_4h", "dense_4h_to_h"),
    native=False,
    batch_invariant=False,
)
