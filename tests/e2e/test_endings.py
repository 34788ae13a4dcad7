"""A server that stops while clients stream, or while it starts."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from tests.e2e.conftest import MODEL, Server, free_port, wait_for_health, write_config
from triptych.deployments.transport import run_dir
from triptych.kvpool.pool.arena import find_orphans, shared_memory_dir

GRACE_S = 20.0
DONE = "data: [DONE]"


def left_over() -> set[Path]:
    """Shared memory and run directories of dead servers."""
    return {*find_orphans(shared_memory_dir()), *run_dir.find_orphans()}


DEPLOY = """
import sys
import ray, yaml
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

address, config = sys.argv[1:]
ray.init(address=address, namespace="serve", log_to_driver=False)
schema = ServeDeploySchema.model_validate(yaml.safe_load(open(config)))
_get_global_client().deploy_apps(schema, _blocking=False)
"""
"""What ``serve deploy`` has the dashboard do."""


def redeploy(server: Server, config: Path) -> None:
    """Change a setting, so that Serve replaces every replica."""
    text = yaml.safe_load(config.read_text())
    text["applications"][0]["args"]["router"] = {"max_queued_requests": 100}
    config.write_text(yaml.safe_dump(text))
    lines = [one.cmdline() for one in server.process.children(recursive=True)]
    (address,) = {part for line in lines for part in line if part.startswith("--gcs-address=")}
    command = [sys.executable, "-c", DEPLOY, address.partition("=")[2], str(config)]
    subprocess.run(command, check=True, timeout=120, cwd=config.parent)


class Stream:
    """A client that streams, and the events that it got."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self.events = list[str]()
        self.fault: Exception | None = None
        self._body = body(max_tokens) | {"stream": True}
        self._url = url
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=120
            ) as response:
                self.events.extend(line for line in response.iter_lines() if line)
        except httpx.HTTPError as error:
            self.fault = error

    @property
    def last(self) -> dict[str, Any]:
        """The last event before the end of the stream."""
        assert self.fault is None, self.fault
        assert self.events[-1] == DONE, self.events[-2:]
        return json.loads(self.events[-2].removeprefix("data: "))


def body(max_tokens: int) -> dict[str, Any]:
    prompt = "The history of the lighthouse begins"
    return {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}


@contextmanager
def triptych_serve(directory: Path, args: dict[str, Any]) -> Generator[tuple[Any, str, Path]]:
    port, log = free_port(), directory / "serve.log"
    config = write_config(directory / "config.yaml", port, {"model": {"name": MODEL}, **args})
    with log.open("w") as output:
        process = subprocess.Popen(
            [Path(sys.executable).with_name("triptych"), "serve", str(config)],
            cwd=directory,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"},
        )
    try:
        yield process, f"http://127.0.0.1:{port}", log
    finally:
        process.kill()
        process.wait()


def test_streams_finish_or_end_with_an_error_and_new_requests_get_503(tmp_path: Path) -> None:
    before = left_over()
    settings = {"graceful_shutdown_timeout_s": GRACE_S}
    with triptych_serve(tmp_path, {"ingress": settings}) as (process, url, log):
        server = Server(url, psutil.Process(process.pid))
        wait_for_health(server, process, log)
        assert {one.nice() for one in server.replicas("Decode")} == {os.nice(0)}
        pages = server.shared_memory()
        children = psutil.Process(process.pid).children(recursive=True)
        short, long = Stream(url, 24), [Stream(url, 6000) for _ in range(2)]
        while not all(len(stream.events) > 3 for stream in (short, *long)):
            time.sleep(0.05)
        process.terminate()
        refusals = list[httpx.Response]()
        while all(stream.thread.is_alive() for stream in long):
            try:
                refusals.append(httpx.post(f"{url}/v1/completions", json=body(1), timeout=20))
            except httpx.ConnectError:
                break
            time.sleep(0.5)
        assert process.wait(timeout=60) == 0, log.read_text()[-4000:]
        for stream in (short, *long):
            stream.thread.join(timeout=5)
    assert short.last["choices"][0]["finish_reason"] == "length"
    assert [stream.last["error"]["code"] for stream in long] == ["shutting_down"] * 2
    refused = [one for one in refusals if one.status_code != 200]
    assert len(refused) >= 5
    for refusal in refused:
        assert refusal.status_code == 503, refusal.text
        assert set(refusal.json()["error"]) == {"message", "type", "param", "code"}
        assert int(refusal.headers["retry-after"]) >= 1
    _, alive = psutil.wait_procs(children, timeout=5)
    assert not alive
    assert not [path for path in pages if path.exists()]
    assert not left_over() - before
    assert "Traceback" not in log.read_text()


def test_streams_outlive_a_redeployment(tmp_path: Path) -> None:
    settings = {"graceful_shutdown_timeout_s": GRACE_S}
    with triptych_serve(tmp_path, {"ingress": settings}) as (process, url, log):
        server = Server(url, psutil.Process(process.pid))
        wait_for_health(server, process, log)
        old = server.replicas("Decode")
        short, long = Stream(url, 60), Stream(url, 6000)
        while not all(len(stream.events) > 3 for stream in (short, long)):
            time.sleep(0.05)
        redeploy(server, tmp_path / "config.yaml")
        answers = list[httpx.Response]()
        until = time.monotonic() + 150
        while any(one.is_running() for one in old) or answers[-1].status_code != 200:
            answers.append(httpx.post(f"{url}/v1/completions", json=body(1), timeout=120))
            assert time.monotonic() < until, [one.text for one in answers[-3:]]
            time.sleep(0.5)
        for stream in (short, long):
            stream.thread.join(timeout=5)
        assert short.last["choices"][0]["finish_reason"] == "length"
        assert long.last["error"]["code"] == "shutting_down"
        for refusal in (one for one in answers if one.status_code != 200):
            assert refusal.status_code == 503, refusal.text
            assert set(refusal.json()["error"]) == {"message", "type", "param", "code"}
            assert int(refusal.headers["retry-after"]) >= 1
        process.terminate()
        assert process.wait(timeout=60) == 0, log.read_text()[-4000:]


@pytest.mark.parametrize("after_s", [1.0, 10.0])
def test_a_start_that_is_interrupted_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    before = left_over()
    with triptych_serve(tmp_path, {}) as (process, _, log):
        time.sleep(after_s)
        children = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(timeout=60) in (0, -15), log.read_text()[-4000:]
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert not left_over() - before
    assert "Traceback" not in log.read_text()
