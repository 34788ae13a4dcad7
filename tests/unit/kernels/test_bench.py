import pytest

from triptych.core.errors import ConfigError
from triptych.kernels import bench


def test_a_row_counts_the_bytes_that_attention_reads() -> None:
    rows = bench.run(["reference", "cpu"], ["k8v4", "k8v4+fp16"], [2], [64], repeats=1)
    assert [(row.backend, row.format) for row in rows] == [
        ("reference", "k8v4"),
        ("cpu", "k8v4"),
        ("reference", "k8v4+fp16"),
        ("cpu", "k8v4+fp16"),
    ]
    assert rows[0].bytes == 2 * 3 * 64 * 104
    assert rows[2].bytes == 2 * 3 * (32 * 104 + 32 * 256)
    assert all(row.time_ms > 0 and row.sdpa_ms > 0 for row in rows)


def test_an_unknown_format_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no page format 'k3v3'"):
        bench.run(["cpu"], ["k3v3"], [1], [16], repeats=1)
