"""Settings are strict, and an error says what to change."""

import pytest

from triptych.core.config import AppConfig
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
            {"pool": {"kv_cache_memory_bytes": "1GB"}},
            "pool.kv_cache_memory_bytes='1GB': expected int",
        ),
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
