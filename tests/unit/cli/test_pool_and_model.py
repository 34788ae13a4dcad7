"""The commands that look into a live pool and into the model store."""

import contextlib
import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from triptych.cli import main as command
from triptych.cli.pool import find_pool, pool_at
from triptych.core.config import PoolConfig
from triptych.core.errors import ConfigError, PoolUnavailable
from triptych.kvpool import About, Access, Namespace, PrefixSettings, Publication
from triptych.kvpool.rpc.calls import StatPool
from triptych.kvpool.rpc.client.pool_client import PoolClient
from triptych.kvpool.rpc.server import PoolServer
from triptych.workers.models.store.safe_files import seal


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["triptych", *arguments])
    with pytest.raises(SystemExit) as stop:
        command.main()
    return int(stop.value.code or 0)


def test_pool_stat_shows_what_a_worker_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, extent_pages=64)
    with PoolServer(config, 256, directory=tmp_path) as server:
        client = PoolClient(server.address, "decode-1", directory=tmp_path, connect_timeout_s=10)
        try:
            client.allocate(10)
            assert call(monkeypatch, "pool", "stat", "--address", server.address, "--json") == 0
            books = json.loads(capsys.readouterr().out)
            assert books["free_pages"] + books["held_pages"] == books["pages"] == 4096
            assert [worker["name"] for worker in books["workers"]] == ["decode-1"]
            assert call(monkeypatch, "pool", "stat", "--address", server.address) == 0
            assert "decode-1" in capsys.readouterr().out
            assert call(monkeypatch, "pool", "check", "--address", server.address) == 0
            assert "all 4096 pages are accounted for" in capsys.readouterr().out
            server._pool.page_pool._leases.owner[3] = 77  # a page that nobody owns
            assert call(monkeypatch, "pool", "check", "--address", server.address, "--json") == 1
            assert json.loads(capsys.readouterr().out)["faults"]
        finally:
            client.close()


def test_pool_stat_tells_formats_tenants_and_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefixes = PrefixSettings(block_tokens=2, total_bytes=4096, tenant_bytes=4096)
    config, tenant = PoolConfig(kv_cache_memory_bytes=1 << 20, extent_pages=64), "ab" * 32
    with (
        PoolServer(config, 256, directory=tmp_path, prefixes=prefixes) as server,
        PoolClient(server.address, "w", directory=tmp_path, connect_timeout_s=10) as client,
    ):
        raw = client.allocate(8)
        [lease_ref] = client.handoff([("r1", raw)], about=[About(tenant, (("fp16", 8),))])
        client.attach([(lease_ref, raw)])
        high = client.allocate(3)
        formats = (("k8v4", 3), ("fp16", 2))
        client.handoff(
            [("r1", np.concatenate([high, raw[:2]]))],
            [lease_ref.lease],
            about=[About(formats=formats)],
        )
        client.handoff([("r2", client.allocate(4))])
        blocks = [client.allocate(2), client.allocate(1)]
        client.publish_prefix(
            Publication(
                namespace=Namespace(salt=b"", model="m", revision="", profile="p"),
                tokens=[1, 2, 3, 4],
                blocks=blocks,
                seconds=0.1,
                tenant="other",
                formats=[(("k8v4", 1), ("fp16", 1)), (("k8v4", 1),)],
            )
        )
        assert call(monkeypatch, "pool", "stat", "--address", server.address, "--json") == 0
        books = json.loads(capsys.readouterr().out)
        assert books["by_request"] == {"r1": 5, "r2": 4, "prefix": 3}
        assert books["by_tenant"] == {tenant: 5, "": 4, "other": 3}
        assert books["by_format"] == {"k8v4": 5, "fp16": 3, "": 4}
        assert call(monkeypatch, "pool", "stat", "--address", server.address) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("k8v4", "abababababab…", "(not said)", "r2"))
        assert call(monkeypatch, "pool", "check", "--address", server.address) == 0
        ledger = server.stat()
    wrong = replace(ledger, by_tenant={"a": 11}, free_pages=0)
    assert [fault.split(":")[0] for fault in wrong.faults] == [
        f"0 free and {ledger.held_pages} held pages",
        "the free_pages of all arenas are not 0",
        "11 pages by tenant",
    ]


def test_pool_stat_tells_of_prefixes_and_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path / "tier"
    config = PoolConfig(kv_cache_memory_bytes=1 << 20, disk_path=str(disk), disk_bytes=1 << 20)
    prefixes = PrefixSettings(block_tokens=2, total_bytes=4096, tenant_bytes=4096)
    with (
        PoolServer(config, 256, directory=tmp_path, prefixes=prefixes) as server,
        PoolClient(server.address, "w", directory=tmp_path, connect_timeout_s=10) as client,
    ):
        space = Namespace(salt=b"", model="m", revision="", profile="p")
        new = Publication(
            namespace=space, tokens=[1, 2], blocks=[client.allocate(3)], seconds=0.1, tenant=""
        )
        assert client.publish_prefix(new) == 1
        while not client.stat().disk.objects:
            time.sleep(0.001)
        assert call(monkeypatch, "pool", "stat", "--address", server.address) == 0
        told = capsys.readouterr().out
        assert "prefixes on disk: 1 blocks" in told
        assert "1.0 MiB, 1 stored, 0 brought back" in told
        assert "takes nothing" not in told
        assert call(monkeypatch, "pool", "stat", "--address", server.address, "--json") == 0
        assert json.loads(capsys.readouterr().out)["disk"]["stored_bytes"] == 768


def test_a_pool_of_another_node_wants_to_see_the_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("a secret of the cluster\n")
    outside = ("127.0.0.1", Access("a secret of the cluster"))
    with PoolServer(
        PoolConfig(kv_cache_memory_bytes=1 << 20), 256, directory=tmp_path, outside=outside
    ) as s:
        assert s.outside is not None
        there = ("--address", f"127.0.0.1:{s.outside.calls}")
        for what in ("stat", "check"):
            shown = ("--token-file", str(token), "--json")
            assert call(monkeypatch, "pool", what, *there, *shown) == 0
            assert json.loads(capsys.readouterr().out)["pages"] == 4096
            assert call(monkeypatch, "pool", what, *there) != 0
            assert "token" in capsys.readouterr().err
        token.write_text("short")
        assert call(monkeypatch, "pool", "stat", *there, "--token-file", str(token)) != 0
        assert "16 printable" in capsys.readouterr().err


def test_a_pool_that_does_not_answer_is_unavailable(tmp_path: Path) -> None:
    with pool_at(f"unix:{tmp_path}/pool.sock") as pool, pytest.raises(PoolUnavailable):
        pool.call(StatPool())


def test_the_only_pool_of_the_user_is_found_and_two_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    base = tmp_path / f"triptych-{os.getuid()}"
    with contextlib.ExitStack() as stack:

        def bind(name: str, *, listening: bool) -> None:
            (base / name).mkdir(parents=True)
            bound = stack.enter_context(socket.socket(socket.AF_UNIX))
            bound.bind(str(base / name / "pool.sock"))
            if listening:
                bound.listen()

        bind("app-killed", listening=False)
        with pytest.raises(ConfigError, match="none"):
            find_pool()
        bind("app-1", listening=True)
        assert find_pool() == f"unix:{base}/app-1/pool.sock"
        bind("app-2", listening=True)
        with pytest.raises(ConfigError, match=r"app-1.*app-2"):
            find_pool()


def test_a_directory_is_its_own_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").touch()
    for verb in ("fetch", "path"):
        assert call(monkeypatch, "model", verb, str(tmp_path)) == 0
        assert capsys.readouterr().out.strip() == str(tmp_path)


def test_a_model_that_is_nowhere_is_one_line_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path))
    assert call(monkeypatch, "model", "path") == 1
    assert "triptych model fetch" in capsys.readouterr().err
    assert call(monkeypatch, "model", "list", "--json") == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2-135m-instruct"]["path"] is None


def test_models_of_this_machine_are_listed_and_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path))
    hub = tmp_path / "hub" / "models--org--Tiny-0.6B"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub.parent))
    converted = tmp_path / "models" / "mine-0123-1"
    for directory in (converted, hub / "snapshots" / "c1899de", hub / "refs"):
        directory.mkdir(parents=True)
    (converted / "model.safetensors").write_bytes(b"weights")
    seal(converted)
    (hub / "refs" / "main").write_text("c1899de")
    (hub / "blobs").mkdir()
    (hub / "blobs" / "ab").write_bytes(b"more weights")
    (hub / "snapshots" / "c1899de" / "model.safetensors").symlink_to(hub / "blobs" / "ab")

    def listed() -> dict[str, str]:
        assert call(monkeypatch, "model", "list", "--json") == 0
        rows = json.loads(capsys.readouterr().out)
        return {row["name"]: row["source"] for row in rows if row["path"]}

    assert listed() == {"mine-0123-1": "gguf", "org/Tiny-0.6B": "hub"}
    assert call(monkeypatch, "model", "rm", "org/Tiny-0.6B") == 0
    assert "MB deleted" in capsys.readouterr().out
    assert not (hub / "blobs" / "ab").exists()
    assert call(monkeypatch, "model", "rm", "mine-0123-1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["path"] == str(converted)
    assert listed() == {}
    assert not converted.exists()
    assert call(monkeypatch, "model", "rm", "mine-0123-1") == 1
    assert "not on this machine (models here: none)" in capsys.readouterr().err
