"""``make clients``: other people's clients against the real server, each in a script of its own.

Builds ``.venv-clients`` once, has schemathesis make up requests from the OpenAPI document, starts
the server on a free port, and runs the scripts with its URL and the model's name. A script
``use_X.py`` with a ``requirements-X.txt`` has the environment ``.venv-clients-X``, all others share
one. Exit code 1 if anything failed.
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
from triptych.workers.models.store.model_store import resolve

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("use_*.py"))
SETTINGS = {
    "model": {"name": MODEL},
    "topology": "colocated",
    "pool": {"kv_cache_memory_bytes": 256 << 20},
}


def tools(client: str = "") -> Path:
    """The programs of a client's environment, or of the one they share; it is built if missing."""
    wanted = HERE / f"requirements-{client}.txt"
    suffix = f"-{client}" if wanted.exists() else ""
    wanted = wanted if wanted.exists() else HERE / "requirements.txt"
    environment = HERE.parents[1] / f".venv-clients{suffix}"
    found, stamp = environment / "bin" / "python", environment / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        venv.create(environment, with_pip=True, clear=True)
        install = [str(found), "-m", "pip", "install", "--quiet", "-r", str(wanted)]
        subprocess.run(install, check=True)
        stamp.write_text(wanted.read_text())
    return found.parent


def use_clients(directory: Path) -> list[str]:
    """Run the scripts against a server with the real model; the names of those that failed."""
    with serve_run(directory, SETTINGS) as server:
        failed = [
            script.stem
            for script in SCRIPTS
            if not _passes(script.stem, [*_call(script), server.url, MODEL], directory)
        ]
        assert server.is_healthy()
    return failed


def _call(script: Path) -> list[str]:
    return [str(tools(script.stem.removeprefix("use_")) / "python"), str(script)]


def try_openapi(directory: Path) -> list[str]:
    """Requests made up from the OpenAPI document, the same ones each time: never a 5xx.

    The HTTP app is the real one; its engine spells letters, or some cases would take minutes.
    """
    tokenizer = make_tokenizer()
    tool = str(tools() / "schemathesis")
    bounds = ["--max-examples", "60", "--seed", "1", "--generation-database", "none"]
    checks = ["--checks", "not_a_server_error", "--phases", "coverage,fuzzing"]
    with serve_app(tokenizer, make_engine(tokenizer), request_timeout_s=60.0) as server:
        command = [tool, "run", f"{server.url}/openapi.json", *bounds, *checks]
        fine = _passes("openapi", command, directory)
        assert httpx.get(f"{server.url}/health").status_code == 200
    return [] if fine else ["openapi"]


def _passes(name: str, command: list[str], directory: Path) -> bool:
    print(f"==> {name}", flush=True)
    quiet = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # or it asks the network first
        "MODEL_FOLDER": str(resolve(MODEL)),
    }
    done = subprocess.run(command, check=False, cwd=directory, timeout=600, env=quiet)
    return done.returncode == 0


def main() -> int:
    for script in SCRIPTS:
        _call(script)
    with TemporaryDirectory() as directory:
        failed = [*try_openapi(Path(directory)), *use_clients(Path(directory))]
    print(f"failed: {', '.join(failed)}" if failed else "all clients are content")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
