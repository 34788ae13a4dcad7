"""The decisions of a server with real engines, made again by the simulator's coordinator."""

from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.messages import Sampling
from triptych.router.replay import replay
from triptych.workers.local import LocalServer


@pytest.mark.parametrize("policy", ["greedy_by_memory", "dynamic", "static:p2c2d4"])
def test_a_live_run_is_decided_the_same_again(
    tiny_model: Path, tmp_path: Path, policy: str
) -> None:
    path = tmp_path / "recording"
    config = AppConfig.from_mapping(
        {
            "model": {"name": "tiny", "dtype": "float32"},
            "pool": {"kv_cache_memory_bytes": 16 << 20, "extent_pages": 64, "prefix_bytes": 0},
            "compressor": {"policy": "uniform:k8v4", "recent_window_tokens": 20},
            "decode": {"max_num_seqs": 4},
            "router": {"batch_policy": policy, "record": str(path)},
        }
    )
    sampling = Sampling(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LocalServer(config, tiny_model) as server:
        requests = [server.request([5 + n] * (20 + 9 * n), sampling) for n in range(9)]
        answers = server.complete(requests)
    assert [len(answer.tokens) for answer in answers] == [6] * 9
    found = replay(path)
    assert found.difference == ""
    assert found.calls >= 2 + 9 * 5  # hello, report; submit and what four stages say of each
    assert found.sent >= 4
