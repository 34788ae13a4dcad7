"""Two nodes with addresses of their own: network namespaces with a line between them."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest

from triptych.kvpool import PoolClient

ROOT = Path(__file__).parents[2]
POOL = ROOT / "tests/unit/kvpool/rpc/pool_process.py"
FETCH = Path(__file__).with_name("fetch_process.py")
TOKEN = "a token of the tests"
FAR, NEAR = f"tri-far-{os.getpid()}", f"tri-near-{os.getpid()}"
PAGES = 512


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[None]:
    """10.99.0.1 and 10.99.0.2, which reach each other and nothing else."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command")
    try:
        ip("netns", "add", FAR)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        ip("netns", "add", NEAR)
        ip("-n", FAR, "link", "add", "line", "type", "veth", "peer", "name", "line", "netns", NEAR)
        for name, address in ((FAR, "10.99.0.1/24"), (NEAR, "10.99.0.2/24")):
            ip("-n", name, "address", "add", address, "dev", "line")
            ip("-n", name, "link", "set", "line", "up")
        yield
    finally:
        for name in (FAR, NEAR):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start(namespace: str, script: Path, *arguments: object) -> "subprocess.Popen[str]":
    command = ["ip", "netns", "exec", namespace, sys.executable, str(script), *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def output_tokens(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_pages_come_from_a_node_with_another_address(namespaces: None, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").mkdir()
    far = start(FAR, POOL, tmp_path / "far", "outside", "10.99.0.1", TOKEN, 20)
    near = start(NEAR, POOL, tmp_path / "near", "outside", "10.99.0.2", TOKEN, 20)
    try:
        far_address, (arena, calls, pages) = output_tokens(far), output_tokens(far).split()
        near_address = output_tokens(near)
        with PoolClient(far_address, "compress", directory=tmp_path / "far") as producer:
            ids = producer.allocate(PAGES)
            rng = np.random.default_rng(0)
            producer.arena.data[ids] = rng.integers(0, 256, (PAGES, producer.page_bytes), np.uint8)
            [lease_ref] = producer.handoff([("r", ids)])
            arguments = (near_address, tmp_path / "near", arena, "10.99.0.1", calls, pages, TOKEN)
            fetching = start(NEAR, FETCH, *arguments)
            digest, _ = fetching.communicate(
                json.dumps([astuple(lease_ref), ids.tolist()]) + "\n", 60
            )
            whole = hashlib.sha256(producer.arena.data[ids].tobytes()).hexdigest()
            assert digest.strip() == whole
            assert producer.stat().by_request == {}
            assert producer.stat().network.sent_bytes == PAGES * producer.page_bytes
    finally:
        for child in (far, near):
            child.kill()
            child.communicate()
