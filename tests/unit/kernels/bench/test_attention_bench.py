import pytest
import torch

from triptych.core.errors import ConfigError, TriptychError
from triptych.kernels.bench import attention_cpu, attention_gpu, selection


def test_a_row_counts_the_bytes_that_attention_reads() -> None:
    rows = attention_cpu.run(["reference", "cpu"], ["k8v4", "k8v4+fp16"], [2], [64], repeats=1)
    assert [(row.backend, row.format) for row in rows] == [
        ("reference", "k8v4"),
        ("cpu", "k8v4"),
        ("reference", "k8v4+fp16"),
        ("cpu", "k8v4+fp16"),
    ]
    assert rows[0].bytes == 2 * 3 * 64 * 104
    assert rows[2].bytes == 2 * 3 * (32 * 104 + 32 * 256)
    assert all(row.time_ms > 0 and row.sdpa_ms > 0 for row in rows)


def test_bytes_of_a_selection_are_all_summaries_and_the_chosen_pages() -> None:
    rows = selection.run_selection(
        ["cpu"], ["moments", "box"], ["k8v4"], [2], [8192], [0.3], [2048], repeats=1
    )
    assert [(row.method, row.rule) for row in rows] == [
        ("moments", "keep 0.3"),
        ("moments", "budget 2048"),
        ("box", "keep 0.3"),
        ("box", "budget 2048"),
    ]
    for row in rows:
        assert row.bytes_whole == 2 * 3 * 8192 * 104
        assert row.bytes_read == row.bytes_formula
    assert [row.pages_read for row in rows[:2]] == [77 / 256, 0.25]


@pytest.mark.parametrize("context", [1024, 4096])
def test_the_byte_formula_for_mixed_formats_is_within_two_percent(context: int) -> None:
    rows = selection.run_selection(
        ["cpu"], ["moments"], ["fp16+k8v4+k4v2"], [2], [context], [0.3], [2048], repeats=1
    )
    for row in rows:
        assert row.bytes_read == pytest.approx(row.bytes_formula, rel=0.02)


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no page format 'k3v3'"):
        attention_cpu.run(["cpu"], ["k3v3"], [1], [16], repeats=1)


@pytest.mark.gpu
def test_a_gpu_row_has_device_times() -> None:
    torch.use_deterministic_algorithms(False)  # cuBLAS would require an environment variable
    shape = attention_cpu.Shape(heads=4, kv_heads=2, head_dim=64)
    rows = list(attention_gpu.run(["k8v4"], batch=2, context=64, shape=shape, repeats=2))
    assert [(row.key_order, row.query) for row in rows] == [
        ("token", "bf16"),
        ("token", "fp32"),
        ("channel", "bf16"),
        ("channel", "fp32"),
    ]
    for row in rows:
        assert row.bytes == 2 * 2 * 64 * 104
        assert 0 < row.fastest_us <= row.median_us
        assert 0 < row.share_of_copy < 1


def test_a_backend_that_leaves_values_unwritten_is_not_measured() -> None:
    shape = attention_cpu.Shape(heads=2, kv_heads=1, head_dim=16)
    case = attention_cpu.build_case(shape, "k8v4", torch.randn(1, 2, 16), 20)
    with attention_cpu.poisoned_memory():
        unwritten = torch.empty(1, 2, 16)
    with pytest.raises(TriptychError, match="off by nan on k8v4 pages"):
        attention_cpu.check_error(unwritten, case.attend("reference"), "cpu", "k8v4")
