"""Settings are strict, and an error says what to change."""

import os
from pathlib import Path

import pytest

from triptych.core.config import AppConfig
from triptych.core.config.machine import STEP_BYTES
from triptych.core.errors import ConfigError


def test_the_defaults_are_a_whole_configuration() -> None:
    assert AppConfig.from_mapping({}) == AppConfig()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"modle": {}}, "modle: unknown key; did you mean 'model'"),
        ({"prefill": {"actor": {"num_gpu": 1}}}, "prefill.actor.num_gpu: unknown key"),
        (
            {"pool": {"page_bytes": 100}},
            "pool.page_bytes=100: expected 'auto' or a multiple of 256",
        ),
        (
            {"pool": {"kv_cache_memory_bytes": "a lot"}},
            "pool.kv_cache_memory_bytes='a lot': expected bytes, or a size such as 4GiB",
        ),
        ({"model": {"served_model_name": ["a", "a"]}}, "model.served_model_name=('a', 'a')"),
        ({"model": {"served_model_name": ["a", ""]}}, "names that differ, none of them empty"),
        ({"pool": {"prefix_bytes": -1}}, "pool.prefix_bytes=-1: expected 'auto' or 0 to"),
        (
            {"pool": {"kv_cache_memory_bytes": 512, "prefix_bytes": 512}},
            "0 to kv_cache_memory_bytes (512)",
        ),
        ({"pool": {"prefix_tenant_bytes": -1}}, "pool.prefix_tenant_bytes=-1: expected 'auto'"),
        ({"pool": {"disk_bytes": 1}}, "pool.disk_bytes=1: expected 0 or a disk_path"),
        ({"pool": {"disk_path": "/x"}}, "pool.disk_bytes=0: expected > 0 with a disk_path"),
        ({"pool": {"disk_path": "x", "disk_bytes": 1}}, "pool.disk_path='x': expected an absolute"),
        (
            {"pool": {"disk_path": "/x", "disk_bytes": 1, "prefix_bytes": 0}},
            "pool.prefix_bytes=0: expected > 0 with a disk_path",
        ),
        (
            {"pool": {"disk_path": "/x", "disk_bytes": 1, "disk_write_bytes_s": 0}},
            "pool.disk_write_bytes_s=0",
        ),
        (
            {"pool": {"disk_path": "/x", "disk_bytes": 1, "disk_tenant_bytes": -1}},
            "pool.disk_tenant_bytes=-1: expected 'auto' or >= 0",
        ),
        ({"pool": {"prefix_eviction": "lfu"}}, "pool.prefix_eviction='lfu': expected 'cost' or"),
        ({"topology": "colocate"}, "did you mean 'colocated'"),
        ({"compressor": {"policy": "uniform:k9"}}, "no page format 'k9'"),
        ({"compressor": {"policy": "magic"}}, "uniform:<format>"),
        ({"decode": {"max_num_seqs": 0}}, "decode.max_num_seqs=0: expected >= 1"),
        ({"prefill": {"actor": {"num_replicas": True}}}, "num_replicas=True: expected int"),
        (
            {"router": {"otlp_traces_endpoint": "localhost:4318"}},
            "router.otlp_traces_endpoint='localhost:4318': expected",
        ),
        ({"router": {"otlp_traces_endpoint": "http://["}}, "an http:// or https:// URL"),
        ({"router": {"otlp_traces_endpoint": "http://h:99999/"}}, "an http:// or https:// URL"),
        ({"router": {"otlp_traces_endpoint": "http:///v1"}}, "an http:// or https:// URL"),
        ({"model": None}, "model=None: expected a mapping"),
        ({"router": {"roles": "dynamic"}}, "router.roles='dynamic': expected 'both', or topology"),
        ({"network": {"tls_cert_file": "c.pem"}}, "all three files, or none of them"),
        ({"network": {"tls_server_name": "x"}}, "expected tls_cert_file beside it"),
        ({"decode": {"actor": {"resources": {"back": 0}}}}, "expected amounts > 0"),
    ],
)
def test_a_wrong_value_names_the_field_the_value_and_the_way_out(
    data: dict[str, object], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        AppConfig.from_mapping(data)
    assert says in str(caught.value)


def test_whole_numbers_are_taken_where_floats_are_meant() -> None:
    assert AppConfig.from_mapping({"pool": {"lease_ttl_s": 3}}).pool.lease_ttl_s == 3.0


def test_sizes_have_units() -> None:
    pool = AppConfig.from_mapping(
        {"pool": {"kv_cache_memory_bytes": "4GiB", "prefix_bytes": "1.5Gi", "disk_path": "/x",
                  "disk_bytes": "10G", "disk_write_bytes_s": "64MiB"}}
    ).pool  # fmt: skip
    assert pool.kv_cache_memory_bytes == 4 << 30
    assert pool.prefix_bytes == 3 << 29
    assert pool.disk_bytes == 10 * 10**9
    assert pool.disk_write_bytes_s == 64.0 * 2**20


def test_the_old_name_of_the_pool_size_takes_units_too() -> None:
    config = AppConfig.from_mapping({"pool": {"capacity_bytes": "2GiB"}})
    assert config.pool.kv_cache_memory_bytes == 2 << 30


def test_memory_for_pages_is_part_of_what_is_free(tmp_path: Path) -> None:
    measured = AppConfig.from_mapping({"pool": {"kv_cache_memory_bytes": "auto"}}).pool
    assert measured.kv_cache_memory_bytes % STEP_BYTES == 0
    assert measured.kv_cache_memory_bytes >= STEP_BYTES
    on_disk = {"kv_cache_memory_bytes": "auto", "arena_path": str(tmp_path / "later")}
    free = os.statvfs(tmp_path)
    found = AppConfig.from_mapping({"pool": on_disk}).pool.kv_cache_memory_bytes
    assert found <= max(free.f_blocks * free.f_frsize, STEP_BYTES)


def test_a_model_has_the_name_that_the_user_gave_it() -> None:
    def names(name: str, served: object = "") -> tuple[str, ...]:
        model = {"name": name, "served_model_name": served}
        return AppConfig.from_mapping({"model": model}).model.served_names

    assert names("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")
    assert names("/models/Llama-3.1-8B/") == ("/models/Llama-3.1-8B/", "Llama-3.1-8B")
    assert names("/models/a.Q4_K_M.gguf") == ("/models/a.Q4_K_M.gguf", "a.Q4_K_M")
    assert names("smollm2-135m-instruct") == ("smollm2-135m-instruct",)
    assert names("Qwen/Qwen3-0.6B@c1899de") == ("Qwen/Qwen3-0.6B", "Qwen3-0.6B")
    assert names("./a@b") == ("./a@b", "a@b")
    assert names("Qwen/Qwen3-0.6B", "mine") == ("mine",)
    assert names("Qwen/Qwen3-0.6B", ["mine", "gpt-4"]) == ("mine", "gpt-4")


@pytest.mark.parametrize(
    ("settings", "cores", "topology"),
    [
        ({}, 1, "colocated"),
        ({}, 2, "disaggregated"),
        ({"prefill": {"actor": {"num_replicas": 2}}}, 1, "disaggregated"),
        ({"compressor": {"autoscaling": {"max_replicas": 2}}}, 1, "disaggregated"),
        ({"decode": {"actor": {"num_gpus": 1}}}, 1, "disaggregated"),
        ({"decode": {"actor": {"num_replicas": 2}}}, 1, "colocated"),
    ],
)
def test_the_machine_chooses_the_topology(
    settings: dict[str, object], cores: int, topology: str
) -> None:
    assert AppConfig.from_mapping({"topology": "auto", **settings}).on_machine(cores).topology == (
        topology
    )
    assert AppConfig.from_mapping(settings).on_machine(cores).topology == "disaggregated"
