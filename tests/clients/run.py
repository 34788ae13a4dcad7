"""``make clients``: other people's clients against the real server, each in a script of its own.

Builds ``.venv-clients`` once, starts the server on a free port, and runs the scripts there with the
server's URL and the model's name. Exit code 1 if one of them failed.
"""

import subprocess
import sys
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.e2e.conftest import MODEL, serve_run

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


def openapi_cases(url: str) -> list[str]:
    """Requests made up from the OpenAPI document, the same ones each time: never a 5xx."""
    tool = str(ENVIRONMENT / "bin" / "schemathesis")
    bounds = ["--max-examples", "20", "--seed", "1", "--workers", "2", "--request-timeout", "60"]
    checks = ["--checks", "not_a_server_error", "--phases", "fuzzing"]
    return [tool, "run", f"{url}/openapi.json", *bounds, *checks]


def main() -> int:
    interpreter, failed = python(), list[str]()
    with TemporaryDirectory() as directory, serve_run(Path(directory), SETTINGS) as server:
        commands = {one.stem: [interpreter, str(one), server.url, MODEL] for one in SCRIPTS}
        commands["openapi"] = openapi_cases(server.url)
        for name, command in commands.items():
            print(f"==> {name}", flush=True)
            if subprocess.run(command, check=False, cwd=directory, timeout=900).returncode:
                failed.append(name)
        assert server.is_healthy()
    print(f"failed: {', '.join(failed)}" if failed else f"{len(commands)} clients are content")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
