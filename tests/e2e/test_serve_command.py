"""``triptych serve`` as systemd and docker treat it."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.e2e.conftest import MODEL, Server, free_port, wait_for_health, write_config

SHARED = Path("/dev/shm")


def pools() -> set[str]:
    return {path.name for path in SHARED.glob("triptych-*")}


def test_a_server_that_is_terminated_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    port, before, log = free_port(), pools(), tmp_path / "serve.log"
    config = write_config(tmp_path / "config.yaml", port, {"model": {"name": MODEL}})
    with log.open("w") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("triptych"), "serve", str(config)],
            cwd=tmp_path,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"},
        )
    try:
        wait_for_health(
            Server(f"http://127.0.0.1:{port}", psutil.Process(process.pid)), process, log
        )
        assert pools() - before
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()[-4000:]
    finally:
        process.kill()
        process.wait()
    assert not pools() - before
    assert "retries remaining" not in log.read_text()  # of calls that Serve's controller ends under
