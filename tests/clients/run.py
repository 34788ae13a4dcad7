"""``make clients``: other people's clients against the real server, each in a script of its own.

Builds ``.venv-clients`` once, has schemathesis make up requests from the OpenAPI document, starts
the server on a free port, and runs the scripts with its URL and the model's name. Exit code 1 if
anything failed.
"""

import os
import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx

from tests.e2e.conftest import MODEL, serve_run
from tests.unit.deployments.http.conftest import make_engine, make_tokenizer, serve_app

HERE = Path(__file__).parent
ENVIRONMENT = HERE.parents[1] / ".venv-clients"
SCRIPTS = sorted(HERE.glob("use_*.py"))
SETTINGS = {
    "model": {"name": MODEL},
    "topology": "colocated",
    "pool": {"capacity_bytes": 256 << 20},
}


def python() -> str:
    """The interpreter of the clients' environment; it is built if it is not there."""
    found, wanted = ENVIRONMENT / "bin" / "python", HERE / "requirements.txt"
    stamp = ENVIRONMENT / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        install = [str(found), "-m", "pip", "install", "--quiet", "-r", str(wanted)]
        subprocess.run(install, check=True)
        stamp.write_text(wanted.read_text())
    return str(found)


def use_clients(directory: Path) -> list[str]:
    """Run the scripts against a server with the real model; the names of those that failed."""
    with serve_run(directory, SETTINGS) as server:
        failed = [
            script.stem
            for script in SCRIPTS
            if not _passes(script.stem, [python(), str(script), server.url, MODEL], directory)
        ]
        assert server.is_healthy()
    return failed


def try_openapi(directory: Path) -> list[str]:
    """Requests made up from the OpenAPI document, the same ones each time: never a 5xx.

    The HTTP app is the real one; its engine spells letters, or some cases would take minutes.
    """
    tokenizer = make_tokenizer()
    tool = str(ENVIRONMENT / "bin" / "schemathesis")
    bounds = ["--max-examples", "60", "--seed", "1", "--generation-database", "none"]
    checks = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    with serve_app(tokenizer, make_engine(tokenizer), request_timeout_s=60.0) as server:
        command = [tool, "run", f"{server.url}/openapi.json", *bounds, *checks]
        fine = _passes("openapi", command, directory)
        assert httpx.get(f"{server.url}/health").status_code == 200
    return [] if fine else ["openapi"]


def _passes(name: str, command: list[str], directory: Path) -> bool:
    print(f"==> {name}", flush=True)
    quiet = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or it asks the network first
    done = subprocess.run(command, check=False, cwd=directory, timeout=600, env=quiet)
    return done.returncode == 0


def main() -> int:
    python()
    with TemporaryDirectory() as directory:
        failed = [*try_openapi(Path(directory)), *use_clients(Path(directory))]
    print(f"failed: {', '.join(failed)}" if failed else "all clients are content")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
