"""Where Python may live, and what may be imported where."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = [
    "core",
    "kernels",
    "kvpool",
    "router",
    "workers",
    "simulator",
    "evals",
    "loadgen",
    "deployments",
    "cli",
]
SOURCES = sorted(path for part in PARTS for path in (ROOT / part / "triptych" / part).rglob("*.py"))

RUNS_WHAT_IT_READS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
RUNNING_BUILTINS = {"eval", "exec", "compile", "__import__"}
READS_ENVIRONMENT = "core/triptych/core/config/cache_dirs.py"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("part", PARTS)
def test_python_lives_only_in_the_namespace(part: str) -> None:
    """A bare folder cannot shadow PyPI's ``kernels``; ``kernels/__init__.py`` would."""
    strays = set((ROOT / part).rglob("*.py")) - set((ROOT / part / "triptych" / part).rglob("*.py"))
    assert not strays


@pytest.mark.parametrize("part", PARTS)
def test_every_part_is_typed(part: str) -> None:
    assert (ROOT / part / "triptych" / part / "py.typed").is_file()


@pytest.mark.parametrize("folder", ["k8s", "docs"])
def test_other_folders_hold_no_python(folder: str) -> None:
    assert not list((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_nothing_that_runs_what_it_reads(path: Path) -> None:
    """A peer, a file or a request may hold anything: it is parsed, never executed."""
    found = list[str]()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in RUNS_WHAT_IT_READS]
        if isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in RUNS_WHAT_IT_READS else []
        if isinstance(node, ast.Call):
            found += [called for called in [ast.unparse(node.func)] if called in RUNNING_BUILTINS]
            found += [called for called in [ast.unparse(node.func)] if called == "torch.load"]
    assert not found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_the_environment_is_read_in_one_place(path: Path) -> None:
    read = [ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Attribute)]
    found = {"os.environ", "os.getenv"} & set(read)
    assert not found or name_of(path) == READS_ENVIRONMENT


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_names_say_what_is_inside(path: Path) -> None:
    assert path.stem not in {"utils", "util", "common", "helpers", "helper", "manager", "misc"}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    """An ``__init__`` that only marks a folder may stay silent."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert ast.get_docstring(tree) or not tree.body


def test_no_text_of_the_repository_names_this_machine() -> None:
    """Paths of one developer's machine have no meaning for anybody else."""
    private = re.compile(r"/(?:root|work|home/\w+)/")
    texts = [*SOURCES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "Makefile"]
    assert not [name_of(path) for path in texts if private.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("actor", ["pool", "router", "ingress"])
def test_actors_that_run_no_model_start_without_torch(actor: str) -> None:
    """Its import takes seconds, which everybody would wait for when one of them has died."""
    code = f"import sys, triptych.deployments.replicas.{actor}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "numba", "triton"} & set(done.stdout.split())
