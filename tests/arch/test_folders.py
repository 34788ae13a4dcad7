"""Where Python may live, and what may be imported where."""

import ast
import re
import subprocess
import sys
from functools import cache
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
ENVIRONMENT = {"os.environ", "os.getenv"}
BANNED_ATTRIBUTES = {"torch.load"} | ENVIRONMENT
READS_ENVIRONMENT = "core/triptych/core/config/cache_dirs.py"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def sources_of(part: str) -> list[Path]:
    return [path for path in SOURCES if path.relative_to(ROOT).parts[0] == part]


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


@pytest.mark.parametrize("part", PARTS)
def test_nothing_runs_what_it_reads_or_reads_the_environment(part: str) -> None:
    """A peer, a file or a request may hold anything: it is parsed, never executed."""
    for path in sources_of(part):
        found = list[str]()
        for node in ast.walk(tree_of(path)):
            match node:
                case ast.Import(names):
                    found += [a.name for a in names if a.name.split(".")[0] in RUNS_WHAT_IT_READS]
                case ast.ImportFrom(str(module)) if module.split(".")[0] in RUNS_WHAT_IT_READS:
                    found.append(module)
                case ast.Call(ast.Name(name)) if name in RUNNING_BUILTINS:
                    found.append(name)
                case ast.Attribute(ast.Name(name), attribute):
                    found += {f"{name}.{attribute}"} & BANNED_ATTRIBUTES
        if name_of(path) == READS_ENVIRONMENT:
            found = [name for name in found if name not in ENVIRONMENT]
        assert not found, name_of(path)


@pytest.mark.parametrize("part", PARTS)
def test_every_module_says_what_it_is_for(part: str) -> None:
    """Its name and its docstring do; an ``__init__`` that only marks a folder may stay silent."""
    for path in sources_of(part):
        tree = tree_of(path)
        assert path.stem not in {"utils", "util", "common", "helpers", "helper", "manager", "misc"}
        assert ast.get_docstring(tree) or not tree.body, name_of(path)


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
