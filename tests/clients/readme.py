"""``make readme``: every command of the README's code blocks as written, in a fresh clone.

The clone is of the last commit. Commands get an empty home, the system's own programs and nothing
of the caller's environment but how pip finds its packages, as in a new container. Takes the ports
of the README, half an hour on two quiet cores, and 3 GB. Exit code 1 if a command did not do what
it is there for.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

ROOT = Path(__file__).parents[2]
URL = "http://127.0.0.1:8000"
TIMEOUT_S = 3600
START_TIMEOUT_S = 1800
"""The first start builds the environment and fetches the model."""
WATCHED_S = 15
KEPT = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy")

SKIPPED = {"make check test": "takes an hour, and is all that continuous integration runs"}
SERVERS = ("make serve", ".venv/bin/triptych serve")
LIVE = (".venv/bin/triptych top",)
"""They show something until they are interrupted."""
PRINTS = {"curl": b'"choices"'}
"""Commands that succeed only if they print this, by their first word."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks(readme: str) -> Iterator[Block]:
    """Code blocks, fenced ones and those that are indented by four spaces, in their order."""
    fenced = r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```$"
    indented = r"(?:(?<=\n\n)|\A)(?P<lines>(?: {4}\S[^\n]*\n)+)"
    found = re.finditer(f"{fenced}|{indented}", readme, flags=re.MULTILINE | re.DOTALL)
    for block in found:
        text = block["fenced"] or re.sub(r"^ {4}", "", block["lines"], flags=re.MULTILINE)
        yield Block(block["language"] or "shell", text)


def commands(block: Block) -> list[str]:
    """The commands of a block of the shell, without comments."""
    joined = block.text.replace("\\\n", " ")
    return [line for text in joined.splitlines() if (line := text.partition(" #")[0].strip())]


def pip_settings() -> dict[str, str]:
    """How this machine's pip finds packages, as environment variables."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    found = re.findall(r"^global\.([\w-]+)='(.*)'$", told.stdout, flags=re.MULTILINE)
    named = {f"PIP_{key.upper().replace('-', '_')}": value for key, value in found}
    return named | {key: value for key, value in os.environ.items() if key.startswith("PIP_")}


class Reader:
    """Somebody who types what the README says, in a clone."""

    def __init__(self, base: Path) -> None:
        home, self.clone = base / "home", base / "triptych"
        home.mkdir()
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        path = "/usr/local/bin:/usr/bin:/bin"
        self.env = {**kept, **pip_settings(), "HOME": str(home), "PATH": path}
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(self.clone)], check=True)
        self._server: subprocess.Popen[bytes] | None = None

    def read(self, block: Block) -> list[str]:
        """Do what a block says; what failed."""
        if block.language == "text":
            return []
        if block.language == "python":
            return self._run("python", [".venv/bin/python", "-c", block.text])
        return [fault for command in commands(block) for fault in self._type(command)]

    def _type(self, command: str) -> list[str]:
        if command in SKIPPED:
            print(f"--> {command}\n    left out: {SKIPPED[command]}", flush=True)
            return []
        if command.startswith(SERVERS):
            return self._serve(command)
        if command in LIVE:
            return self._watch(command)
        return self._run(command, ["bash", "-c", command])

    def _run(self, name: str, command: list[str]) -> list[str]:
        began = time.monotonic()
        process = self._start(name, command)
        try:
            output, _ = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return [f"{name}: not done after {TIMEOUT_S} s"]
        print(f"    {process.returncode} after {time.monotonic() - began:.0f} s", flush=True)
        print("\n".join(f"    | {line}" for line in output.decode().splitlines()[-6:]), flush=True)
        if process.returncode:
            return [f"{name}: exit code {process.returncode}"]
        is_printed = PRINTS.get(name.partition(" ")[0], b"") in output
        return [] if is_printed else [f"{name}: printed {output[-300:]!r}"]

    def _watch(self, command: str) -> list[str]:
        process = self._start(command, ["bash", "-c", f"exec {command}"])
        time.sleep(WATCHED_S)
        if process.poll() is not None:
            return [f"{command}: ended with {process.returncode}"]
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
        return [] if b"decode" in output else [f"{command}: showed {output[-300:]!r}"]

    def _serve(self, command: str) -> list[str]:
        self.stop()
        log = self.clone / "serve.log"
        self._server = self._start(command, ["bash", "-c", f"exec {command} >{log} 2>&1"])
        deadline, began = time.monotonic() + START_TIMEOUT_S, time.monotonic()
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                if httpx.get(f"{URL}/health", timeout=5).status_code == 200:
                    print(f"    answers after {time.monotonic() - began:.0f} s", flush=True)
                    return []
            except httpx.HTTPError:
                pass
            time.sleep(1)
        return [f"{command}: does not answer:\n{log.read_text()[-3000:]}"]

    def stop(self) -> None:
        """End the server, as ctrl-c would."""
        if self._server is None:
            return
        self._server.send_signal(signal.SIGINT)
        try:
            self._server.wait(timeout=90)
        except subprocess.TimeoutExpired:
            os.killpg(self._server.pid, signal.SIGKILL)
            self._server.wait()
        self._server = None
        deadline = time.monotonic() + 30  # make ends before the server that it started
        while time.monotonic() < deadline and is_answering():
            time.sleep(0.2)

    def _start(self, name: str, command: list[str]) -> "subprocess.Popen[bytes]":
        print(f"--> {name}", flush=True)
        return subprocess.Popen(
            command,
            cwd=self.clone,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def is_answering() -> bool:
    """Whether something still listens where the last server did."""
    try:
        httpx.get(f"{URL}/health", timeout=5)
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True


def main() -> int:
    with TemporaryDirectory(prefix="triptych-readme-") as base:
        reader = Reader(Path(base))
        try:
            found = list(blocks((reader.clone / "README.md").read_text()))
            faults = [fault for block in found for fault in reader.read(block)]
        finally:
            reader.stop()
        print("\n".join(faults) or f"all {len(found)} blocks of the README work", flush=True)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
