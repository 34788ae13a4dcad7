"""Addresses of arrays in compiled functions: numba does not know that they keep an array."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILED = {"kernel", "summing_kernel", "inlined", "team_body", "job_start"}
ADDRESSING = {"line_address", "scratch_of"}
"""Functions that return an address in an array, or views that do not keep it."""


def early_deaths(source: str) -> Iterator[str]:
    """Local arrays of compiled functions whose address is taken after their last other use.

    numba frees an array after the last statement that uses it, which may be before a call that got
    its address as an integer.
    """
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef):
            continue
        if not any(isinstance(d, ast.Name) and d.id in COMPILED for d in function.decorator_list):
            continue
        given = {argument.arg for argument in function.args.args} | set(_views(function))
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        for node in ast.walk(function):
            if _takes_address(node):
                array = next(
                    part.id for part in ast.walk(_addressed(node)) if isinstance(part, ast.Name)
                )
                last = max(name.lineno for name in names if name.id == array)
                if array not in given and last <= node.lineno:
                    yield f"{function.name}: {array}"


def _views(function: ast.FunctionDef) -> Iterator[str]:
    """Names of views of memory that an address gives."""
    for node in ast.walk(function):
        if not (isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)):
            continue
        if ast.unparse(node.value.func) in {"carray", "scratch_of"}:
            named = ast.walk(node.targets[0])
            yield from (part.id for part in named if isinstance(part, ast.Name))


def _takes_address(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ADDRESSING
    return isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".ctypes.data")


def _addressed(node: ast.AST) -> ast.AST:
    return node.args[0] if isinstance(node, ast.Call) else node


def test_no_local_array_is_freed_before_its_address_is_used(root: Path) -> None:
    files = sorted((root / "kernels").rglob("*.py"))
    assert [died for file in files for died in early_deaths(file.read_text())] == []


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("run_team(team, body, job.ctypes.data, threads if job[0] else 1)", ["start: job"]),
        ("run_team(team, body, job, threads)", []),
        ("run_team(team, body, line_address(job), threads)", ["start: job"]),
        ("at = line_address(job)\n    run_team(team, body, at, threads)\n    job[0] = 0", []),
    ],
)
def test_an_address_as_the_last_use_is_found(call: str, expected: list[str]) -> None:
    source = f"@kernel\ndef start(team, body, threads):\n    job = np.empty(8)\n    {call}\n"
    assert list(early_deaths(source)) == expected
