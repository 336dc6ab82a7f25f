from types import SimpleNamespace

from lockstep.models.shapes import peak_flops, training_flops, utilisation


def test_flops_by_hand() -> None:
    config = SimpleNamespace(hidden_size=8, num_attention_heads=2, num_hidden_layers=3)
    # 6 x 100 x (4 + 2); attention 3 x 2 x 2 heads x 4 head_dim x 3 layers x (16 + 4)
    assert training_flops(config, parameters=100, lengths=[4, 2]) == 3600 + 3 * 2 * 2 * 4 * 3 * 20
    config.head_dim = 16
    assert training_flops(config, parameters=0, lengths=[1]) == 3 * 2 * 2 * 16 * 3
    config.layer_types = ["linear_attention", "linear_attention", "full_attention"]
    assert training_flops(config, parameters=0, lengths=[1]) == 3 * 2 * 2 * 16


def test_peaks_of_known_gpus() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("NVIDIA H100 PCIe") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert peak_flops("Some GPU") is None


def test_utilisation_by_hand() -> None:
    assert utilisation(3e12, seconds=1.5, peak=4e12) == 0.5
