"""``make wheel``: the wheel outside of the checkout, as somebody has it who only installed it.

Builds it, installs it into a new environment with the versions of requirements.lock, and runs the
README's commands there with an empty home. What is missing in the wheel, or is found only because
the checkout is the current folder, shows here. Takes minutes and 3 GB.
"""

import json
import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import yaml

from tests.e2e.conftest import MODEL, free_port

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300
KEPT = ("PATH", "LANG", "TMPDIR", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE")


class Outside:
    """An environment with the wheel alone, an empty home, and a current folder that is empty."""

    def __init__(self, base: Path) -> None:
        self.home, self.folder, self.bin = base / "home", base / "here", base / "venv" / "bin"
        self.home.mkdir()
        self.folder.mkdir()
        kept = {name: value for name, value in os.environ.items() if name in KEPT}
        mirror = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.env = {**kept, **mirror, "HOME": str(self.home), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env["PATH"] = f"{self.bin}:{self.env['PATH']}"

    def run(self, *command: str, expect: tuple[int, ...] = (0,), timeout_s: float = 600) -> str:
        """What a command prints; fails if it ends with another code than expected."""
        print("==>", " ".join(command), flush=True)
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode in expect, f"{done.returncode}: {done.stdout[-4000:]}"
        return done.stdout

    @contextmanager
    def serving(self, *arguments: str) -> Iterator[None]:
        """``triptych serve``, until the block ends."""
        print("==> triptych serve", *arguments, flush=True)
        log = self.folder / "serve.log"
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(self.bin / "triptych"), "serve", *arguments],
                cwd=self.folder,
                env=self.env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        try:
            yield
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) in {0, 1, -2, 130}
        except BaseException:
            print(log.read_text()[-6000:], flush=True)
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def install(outside: Outside) -> None:
    """Build the wheel, and put it and what it needs into a new environment."""
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input"]
    build = [sys.executable, "-m", "pip", "wheel", *quiet, "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "-w", str(outside.home), str(ROOT)], check=True)
    (wheel,) = outside.home.glob("*.whl")
    venv.create(outside.bin.parent, with_pip=True)
    pins = str(ROOT / "requirements.lock")
    outside.run("python", "-m", "pip", "install", *quiet, "-c", pins, str(wheel), timeout_s=1800)
    wheel.unlink()


def without_a_server(outside: Outside) -> None:
    """What needs nothing running."""
    assert "doctor" in outside.run("triptych", "--help")
    assert outside.run("triptych", "--version").startswith("triptych ")
    assert "ingress.grpc_port" in outside.run("triptych", "config", "explain")
    outside.run("triptych", "model", "fetch")
    assert MODEL in outside.run("triptych", "model", "list")
    assert "diffkv" in outside.run("triptych", "plan", "--memory", "4GiB")
    findings = json.loads(outside.run("triptych", "doctor", "--json", expect=(0, 1)))
    assert {one["check"] for one in findings} >= {"versions", "port", "model"}
    assert not [one for one in findings if one["check"] in {"versions", "model"} and one["remedy"]]
    simulated = ("--replicas", "10", "--requests", "200", "--json", "sim.json")
    outside.run("triptych", "simulate", *simulated)
    assert (outside.folder / "sim.json").exists()


def with_a_server(outside: Outside, port: int, grpc_port: int) -> None:
    """What the README says to do with one."""
    url = f"http://127.0.0.1:{port}"
    wait_for(url)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "The capital of Japan?"}]}
    told = outside.run(
        *("curl", "-sS", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"),
        *("-d", json.dumps({**body, "max_tokens": 32, "temperature": 0})),
    )
    assert "Tokyo" in json.loads(told)["choices"][0]["message"]["content"], told
    assert "<title>" in outside.run("curl", "-sS", f"{url}/dashboard")
    assert "triptych_pool" in outside.run("curl", "-sS", f"{url}/metrics")
    assert "decode" in outside.run("triptych", "top", "--url", url, "--looks", "1")
    load = ("--url", url, "--concurrency", "1", "--requests", "2", "--json", "out.json")
    outside.run("triptych", "bench", "serve", *load)
    asked = f"""
import grpc
from triptych.deployments.grpc.triptych_pb2 import CompletionRequest
from triptych.deployments.grpc.triptych_pb2_grpc import TriptychStub
with grpc.insecure_channel("127.0.0.1:{grpc_port}") as channel:
    for part in TriptychStub(channel).StreamCompletion(CompletionRequest(prompt=["Hello"])):
        print(part.choices[0].text if part.choices else part.usage)
"""
    assert "completion_tokens: 16" in outside.run("python", "-c", asked)


def wait_for(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise AssertionError(f"{url} did not become healthy")


def write_config(path: Path, port: int, grpc_port: int) -> None:
    """The defaults, but for the ports: another server may have theirs."""
    args = {"ingress": {"grpc_port": grpc_port}}
    app = {"name": "triptych", "import_path": "triptych.deployments.app:build_app", "args": args}
    options = {"host": "127.0.0.1", "port": port}
    path.write_text(yaml.safe_dump({"http_options": options, "applications": [app]}))


def main() -> int:
    with TemporaryDirectory(prefix="triptych-wheel-") as base:
        outside = Outside(Path(base))
        install(outside)
        without_a_server(outside)
        port, grpc_port = free_port(), free_port()
        write_config(outside.folder / "my.yaml", port, grpc_port)
        assert "disaggregated" in outside.run("triptych", "validate", "my.yaml")
        with outside.serving("my.yaml"):
            with_a_server(outside, port, grpc_port)
    print("the wheel works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
