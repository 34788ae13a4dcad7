"""Prometheus itself, and promtool: from the machine, or from Debian's package for tests alone.

``python -m tests.prometheus`` fetches the package into ``.venv`` if it is needed and apt is there;
it installs nothing on the machine and needs no root. Without it the tests that ask Prometheus are
skipped.
"""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

UNPACKED = Path(__file__).parents[1] / ".venv" / "prometheus"
START_TIMEOUT_S = 60


def program(name: str) -> str:
    """Where ``prometheus`` or ``promtool`` is; skips the test if it is nowhere."""
    found = _find(name)
    if found is None:
        pytest.skip(f"no {name} here: 'make test' fetches it where there is apt")
    return found


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=str(UNPACKED / "usr" / "bin"))


class Prometheus:
    """A running server, asked as Grafana asks it."""

    def __init__(self, api: httpx.Client) -> None:
        self._api = api

    def ask(self, path: str, **parameters: str) -> dict[str, Any]:
        """What the API says to a question."""
        answer = self._api.get(path, params=parameters).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def values(self, query: str) -> list[float]:
        """The values of all series that a query has now."""
        return [float(series["value"][1]) for series in self.ask("/query", query=query)["result"]]

    def wait_for_scrapes(self, count: int) -> None:
        """Until the target was read so often from now on."""
        began, deadline = time.time(), time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            read = self.values(f"count_over_time(up[{time.time() - began + 1:.0f}s])")
            if read and min(read) > count:
                return
            time.sleep(0.5)
        raise AssertionError("nothing is scraped")


@contextmanager
def prometheus(folder: Path, target: str, rules: object, port: int) -> Iterator[Prometheus]:
    """A server that reads one target every second, with the labels that a PodMonitor gives."""
    labels = {"namespace": "triptych", "pod": "stages-0", "ray_io_cluster": "triptych"}
    scraped = {"targets": [target.removeprefix("http://")], "labels": labels}
    settings = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "triptych", "static_configs": [scraped]}],
    }
    (folder / "rules.yml").write_text(json.dumps(rules))
    (folder / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    at = f"127.0.0.1:{port}"
    command = [program("prometheus"), f"--web.listen-address={at}", "--config.file=prometheus.yml",
               "--storage.tsdb.path=data", "--log.level=warn"]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
        try:
            _wait_until_ready(f"http://{at}", folder / "prometheus.log")
            with httpx.Client(base_url=f"http://{at}/api/v1", timeout=30) as api:
                yield Prometheus(api)
        finally:
            process.terminate()
            process.wait(timeout=30)


def _wait_until_ready(url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/-/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"Prometheus did not start:\n{log.read_text()[-3000:]}")


def fetch() -> str:
    """Unpack Debian's package below ``.venv``; what went wrong, or nothing."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        return "there is no apt"
    with TemporaryDirectory() as folder:
        done = _download(Path(folder))
        if done.returncode:  # perhaps the lists of packages are missing: then ones of our own
            done = _download(Path(folder), *_own_lists(Path(folder)))
        packages = sorted(Path(folder).glob("prometheus_*.deb"))
        if done.returncode or not packages:
            return done.stderr.strip()[-300:]
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(UNPACKED)], check=True)
    return ""


def _download(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    command = ["apt-get", *options, "download", "prometheus"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def _own_lists(folder: Path) -> list[str]:
    options = list[str]()
    for name in ("State", "Cache"):
        (folder / name / "lists" / "partial").mkdir(parents=True)
        (folder / name / "archives" / "partial").mkdir(parents=True)
        options += ["-o", f"Dir::{name}={folder / name}"]
    options += ["-o", "Dir::State::status=/var/lib/dpkg/status"]
    subprocess.run(["apt-get", *options, "update"], capture_output=True, check=False)
    return options


if __name__ == "__main__":
    if not all(map(_find, ("prometheus", "promtool"))) and (why := fetch()):
        sys.stderr.write(f"no Prometheus, so tests that ask it are skipped: {why}\n")
