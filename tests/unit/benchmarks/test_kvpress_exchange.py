"""Records that kvpress writes in another environment are read back for the same cases only."""

import json
from pathlib import Path

import pytest

from benchmarks.methods.kvpress_exchange import CASES, job_hash, read_records, write_cases
from triptych.core.config import AppConfig
from triptych.core.errors import ConfigError
from triptych.evals.studies.study import Study, prepare, report

BASE = AppConfig.from_mapping(
    {"pool": {"kv_cache_memory_bytes": 16 << 20}, "compressor": {"recent_window_tokens": 20}}
)


@pytest.fixture
def study(tiny_model: Path) -> Study:
    return Study(
        model=str(tiny_model),
        base=BASE,
        methods=("uniform:k8v8", "simulated:k2v2"),
        contexts=(100, 200),
        documents=2,
        steps=16,
        tasks=("passkey",),
        task_context=200,
        task_count=2,
        greedy_tokens=12,
    )


def test_records_from_elsewhere_count_only_for_the_same_cases(study: Study, tmp_path: Path) -> None:
    prepared = prepare(study)
    groups, revision = prepared.groups, prepared.facts.revision
    write_cases(tmp_path, prepared.path, revision, groups)
    content = json.loads((tmp_path / CASES).read_text())
    kl = [0.5] * 16
    body = {
        group["name"]: [
            {
                "case": case["name"],
                "steps": {"kl": kl, "agree": kl, "nll_full": kl, "nll": kl}
                if case["scored"]
                else None,
                "tokens": [7] * case["free_tokens"],
                "footprint": {"full_bytes": 100, "data_bytes": 30, "all_in_bytes": 30},
            }
            for case in group["cases"]
        ]
        for group in content["groups"]
    }
    other = {"method": "other", "job": content["job"], "groups": body}
    (tmp_path / "other.json").write_text(json.dumps(other))
    found = read_records(tmp_path, revision, groups)
    rows = report(prepared, {"full": found["other"], **found}).rows
    assert rows[-1].method == "other"
    assert rows[-1].bytes_all_in_ratio == 0.3
    assert rows[-1].summary.kl == pytest.approx(0.5)
    assert job_hash("another model", groups) != content["job"]
    with pytest.raises(ConfigError, match="other cases"):
        read_records(tmp_path, "another model", groups)
    (tmp_path / "broken.json").write_text('{"job": 1')
    with pytest.raises(ConfigError, match=r"broken\.json"):
        read_records(tmp_path, revision, groups)
