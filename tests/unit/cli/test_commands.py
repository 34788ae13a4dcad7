"""The command as a user calls it: output, exit codes, errors of one line."""

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.tiny import save_tiny_model
from tests.unit.cli.conftest import Run
from tests.unit.cli.fake_openai import FakeOpenAI, serving
from triptych.cli.serving.serve import RAY_ENVIRONMENT
from triptych.cli.serving.serve_file import DEFAULT, default_serve_file
from triptych.core.config import AppConfig
from triptych.core.profile import Profile
from triptych.deployments.http.keys import KeyRing
from triptych.kvpool.pool.arena import shared_memory_dir


@pytest.fixture
def serve_file(tmp_path: Path) -> Callable[[object], str]:
    def write(args: object) -> str:
        (app,) = DEFAULT["applications"]  # type: ignore[misc]
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump({**DEFAULT, "applications": [{**app, "args": args}]}))
        return str(path)

    return write


def test_the_version_is_that_of_the_package(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out.split()[0]) == (0, "triptych")


def test_every_command_has_help(run: Run) -> None:
    for path in (
        [],
        ["serve"],
        ["validate"],
        ["doctor"],
        ["plan"],
        ["drain"],
        ["model"],
        ["bench", "serve"],
        ["pool", "stat"],
    ):
        code, out, _ = run(*path, "--help")
        assert code == 0
        assert "Usage: triptych" in out


def test_output_into_a_pipe_has_no_escape_sequences() -> None:
    for arguments in (["config", "explain"], ["--help"], ["validate", "none.yaml"]):
        command_line = [sys.executable, "-c", "from triptych.cli.main import main; main()"]
        done = subprocess.run([*command_line, *arguments], capture_output=True, check=False)
        assert done.stdout or done.stderr
        assert b"\x1b" not in done.stdout + done.stderr


def test_every_setting_is_explained(run: Run) -> None:
    code, out, _ = run("config", "explain", "--json")
    settings = {setting["key"]: setting for setting in json.loads(out)}
    assert code == 0
    assert settings["model.name"]["default"] == AppConfig().model.name
    assert all(setting["meaning"] for setting in settings.values())


def test_a_good_file_is_valid_and_says_what_it_starts(
    run: Run, serve_file: Callable[[object], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path / "empty"))
    code, out, _ = run(
        "validate", serve_file({"prefill": {"actor": {"num_replicas": 3}}}), "--json"
    )
    (app,) = json.loads(out)
    assert code == 0
    assert app["actors"]["prefill"]["num_replicas"] == 3
    assert {"ingress", "router", "pool", "compressor", "decode"} <= app["actors"].keys()
    assert app["pages"] is None
    code, out, _ = run("validate", serve_file({"topology": "colocated"}))
    assert code == 0
    assert "worker (all stages)" in out


def test_validate_looks_at_the_disk(
    tmp_path: Path, run: Run, serve_file: Callable[[object], str]
) -> None:
    def disk(path: Path, nbytes: int = 4096) -> str:
        return serve_file({"pool": {"disk_path": str(path), "disk_bytes": nbytes}})

    fine, open_to_all = tmp_path / "a" / "b", tmp_path / "open"
    code, out, _ = run("validate", disk(fine))
    assert code == 0
    assert "disk: up to 4,096 bytes of prefixes in" in out
    assert not fine.exists()
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    file = tmp_path / "file"
    file.touch()
    for path, nbytes, wrong in (
        (fine, 1 << 60, f"pool.disk_bytes={1 << 60}: {fine} has room for"),
        (open_to_all, 1, "can be changed by others"),
        (file / "below", 1, f"{file} is no directory that this user can write to"),
    ):
        code, _, err = run("validate", disk(path, nbytes))
        assert code == 2
        assert wrong in err.replace("\n", " ")


def test_validate_looks_at_the_disk_of_the_pages(
    tmp_path: Path, run: Run, serve_file: Callable[[object], str]
) -> None:
    def pages(path: Path, nbytes: int = 16 << 20, method: str = "none") -> str:
        pool = {
            "arena_path": str(path),
            "kv_cache_memory_bytes": nbytes,
            "prefix_bytes": 0,
            "extent_pages": 16,
        }
        return serve_file({"pool": pool, "decode": {"selection": {"method": method}}})

    file = tmp_path / "file"
    file.touch()
    code, out, _ = run("validate", pages(tmp_path / "new"))
    assert code == 0
    assert "pages: 16,777,216 bytes in" in out
    assert "warning: every step reads them all" in out
    assert not (tmp_path / "new").exists()
    code, out, _ = run("validate", pages(tmp_path, method="moments"))
    assert "every step reads them all" not in out
    for path, nbytes, wrong in (
        (tmp_path, 1 << 60, f"pool.kv_cache_memory_bytes={1 << 60}: {tmp_path} has room for"),
        (file / "below", 1 << 24, f"{file} is no directory that this user can write to"),
    ):
        code, _, err = run("validate", pages(path, nbytes))
        assert code == 2
        assert wrong in err.replace("\n", " ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"modle": {}}, "did you mean 'model'"),
        ({"decode": {"max_num_seqs": 0}}, "decode.max_num_seqs=0: expected >= 1"),
        ({"compressor": {"policy": "uniform:k9v9"}}, "k9v9"),
        ({"pool": {"page_bytes": 100}}, "multiple of 256"),
        ({"pool": {"arena_path": "pages"}}, "pool.arena_path='pages': expected an absolute path"),
        ({"network": {"token_file": "/none"}}, "network.token_file='/none': No such file"),
        (["no", "mapping"], "expected a mapping"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    run: Run, serve_file: Callable[[object], str], args: object, said: str
) -> None:
    code, out, err = run("validate", serve_file(args))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert said in err


@pytest.mark.parametrize("text", ["", "a: [", "a: b", "applications: []", "applications: [1]"])
def test_a_file_that_is_no_serve_file_is_refused(run: Run, tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text)
    code, _, err = run("validate", str(path))
    assert code == 2
    assert "odd.yaml" in err


def test_no_pool_is_said_with_what_to_do(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    code, _, err = run("pool", "stat")
    assert code == 2
    assert "--address" in err


def test_bench_serve_writes_figures_and_prints_a_table(tmp_path: Path) -> None:
    async def measure() -> tuple[int, str, dict[str, object]]:
        path = tmp_path / "r.json"
        async with serving(FakeOpenAI(token_s=0.001)) as url:
            arguments = ["bench", "serve", "--url", url, "--concurrency", "1,2", "--requests", "4"]
            arguments += ["--prompt-tokens", "8", "--output-tokens", "3", "--json", str(path)]
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", "from triptych.cli.main import main; main()", *arguments,
                stdout=asyncio.subprocess.PIPE,
            )  # fmt: skip
            out, _ = await process.communicate()
        return process.returncode or 0, out.decode(), json.loads(path.read_text())

    code, out, result = asyncio.run(measure())
    assert code == 0
    assert "TTFT" in out
    rows = result["rows"]
    assert isinstance(rows, list)
    assert [row["max_concurrency"] for row in rows] == [1, 2]
    assert all(row["completed"] == 4 and row["total_output_tokens"] == 12 for row in rows)
    assert {"cpu", "cores", "versions", "commit"} <= dict(result["host"]).keys()  # type: ignore[call-overload]


def test_bench_of_a_server_that_is_not_there_is_exit_code_1(run: Run) -> None:
    code, _, err = run("bench", "serve", "--url", "http://127.0.0.1:9", "--model", "m")
    assert code == 1
    assert "ConnectError" in err


def test_bench_refuses_loads_that_make_no_sense(run: Run) -> None:
    for option in (["--concurrency", "1.5"], ["--rate", "fast"], ["--concurrency", "0"]):
        code, _, err = run("bench", "serve", "--model", "m", *option)
        assert code == 2
        assert "expected" in err


def test_serve_checks_the_file_fetches_the_model_and_runs_it(
    run: Run,
    serve_file: Callable[[object], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save_tiny_model(tmp_path)
    started = list[list[str]]()

    monkeypatch.setattr("triptych.cli.serving.serve.become", started.append)
    compiling = list[list[str]]()
    monkeypatch.setattr(
        "triptych.cli.serving.serve.start_child", lambda child: compiling.append(child) or 1421
    )
    for name in RAY_ENVIRONMENT:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    served = {"name": str(tmp_path), "served_model_name": "tiny"}
    path = serve_file({"model": served, "compressor": {"methods": ["kvarn", "kvmerger"]}})
    code, _, err = run("serve", path)
    assert code == 0
    told = " ".join(err.split())
    assert "http://127.0.0.1:8000/v1 " in told
    assert "tokens or more at once" in told
    assert "in K8V8, others in K8V4" in told
    assert """curl 'http://127.0.0.1:8000/v1/chat/completions'""" in told
    assert '"model": "tiny"' in told
    ((program, *command),) = started
    assert program == sys.executable
    module, *arguments = command[1:]
    assert arguments == [path, "30.0", "", "1421", str(shared_memory_dir())]
    needs = ["merged_tokens", "whole_pages"]
    assert compiling == [[sys.executable, "-m", "triptych.kernels.precompile", *needs]]
    assert {name: os.environ[name] for name in RAY_ENVIRONMENT} == RAY_ENVIRONMENT
    assert find_spec(module)
    assert find_spec("triptych.deployments.serve_run")


def test_help_of_calibrate_has_headings(run: Run) -> None:
    code, out, _ = run("calibrate", "--help")
    assert code == 0
    headings = [line for line in out.splitlines() if line.endswith(":") and line[:1].isalpha()]
    assert headings[0] == "Arguments:"
    assert headings[-1] == "Options:"
    limits = out.partition("Limits of quality:")[2].partition("\n\n")[0]
    assert [line.split()[0] for line in limits.splitlines() if "--" in line] == [
        "--max-kl",
        "--min-top1",
        "--max-perplexity-ratio",
    ]


def test_serve_without_a_file_writes_the_defaults(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE_DIR", str(tmp_path))
    path = default_serve_file()
    assert yaml.safe_load(path.read_text()) == DEFAULT
    assert run("validate", str(path))[0] == 0


def test_serve_of_a_wrong_file_starts_nothing(
    run: Run, serve_file: Callable[[object], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(_command: list[str]) -> None:
        pytest.fail("started")

    monkeypatch.setattr("triptych.cli.serving.serve.become", begin)
    assert run("serve", serve_file({"modle": {}}))[0] == 2


def test_bench_attention_writes_a_row_for_every_case(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    options = ["--formats", "k8v4", "--batch", "1,2", "--context", "32", "--repeats", "1"]
    code, out, _ = run("bench", "attention", *options, "--json", str(path))
    assert code == 0
    assert "k8v4" in out
    rows = json.loads(path.read_text())["rows"]
    wanted = {"backend", "format", "batch", "context", "time_ms", "bytes", "gb_per_s"}
    assert all(wanted | {"speedup_vs_sdpa_fp32"} <= row.keys() for row in rows)
    assert [(row["format"], row["batch"], row["context"]) for row in rows] == [
        ("k8v4", 1, 32),
        ("k8v4", 2, 32),
    ]


@pytest.mark.conformance  # 20 s of compiling
def test_bench_selection_writes_a_row_for_every_rule(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "selection.json"
    options = ["--formats", "k8v4", "--batch", "1", "--context", "640", "--repeats", "1"]
    options += ["--keep", "0.5", "--budget", "128"]
    code, _, _ = run("bench", "selection", *options, "--json", str(path))
    assert code == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["rule"] for row in rows] == ["keep 0.5", "budget 128"]
    assert [row["pages_read"] for row in rows] == [0.5, 0.2]


def test_bench_selection_of_an_unknown_method_is_exit_code_2(run: Run) -> None:
    code, _, err = run("bench", "selection", "--method", "luck", "--context", "64")
    assert code == 2
    assert "luck" in err


def test_bench_attention_of_an_unknown_format_is_exit_code_2(run: Run) -> None:
    code, _, err = run("bench", "attention", "--formats", "k9v9", "--context", "8")
    assert code == 2
    assert "k9v9" in err


def test_a_new_key_opens_what_its_entry_locks(run: Run, serve_file, tmp_path: Path) -> None:
    status, entry, key = run("key", "new", "ada", "--concurrent", "2", "--per-minute", "9")
    assert status == 0
    path = tmp_path / "keys.yaml"
    path.write_text(entry)
    holder = KeyRing(path).client(f"Bearer {key.split()[-1]}").key
    assert holder is not None
    assert (holder.name, holder.max_concurrent_requests, holder.requests_per_minute) == (
        "ada",
        2,
        9,
    )
    made = json.loads(run("key", "new", 'a "name": x', "--json")[1])
    assert made["key"] not in json.dumps(made["entry"])
    assert run("validate", serve_file({"ingress": {"api_keys": str(path)}}))[0] == 0
    status, _, error = run("validate", serve_file({"ingress": {"api_keys": "nowhere.yaml"}}))
    assert status == 2
    assert "ingress.api_keys=nowhere.yaml" in error


def test_validate_takes_manifests_from_a_folder_and_from_a_pipe(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = Path(__file__).parents[3] / "k8s" / "base"
    code, out, _ = run("validate", str(base / "instance" / "rayservice.yaml"))
    assert code == 0
    assert "1 objects are right: RayService" in out
    text = (
        (base / "instance" / "rayservice.yaml").read_text().replace("mode: token", "mode: disabled")
    )
    (tmp_path / "instance.yaml").write_text(text)
    (tmp_path / "network.yaml").write_text((base / "shared" / "network.yaml").read_text())
    code, out, _ = run("validate", str(tmp_path), "--json")
    (problem,) = json.loads(out)
    assert code == 2
    assert problem["remedy"] == "set rayClusterConfig.authOptions.mode: token"
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    code, out, _ = run("validate", "-")
    assert code == 2
    assert "mode: token" in out


def test_a_folder_that_cannot_be_rendered_says_how(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = run("validate", str(tmp_path))
    assert code == 2
    assert "no YAML file" in err
    chart = Path(__file__).parents[3] / "k8s" / "chart"
    code, _, err = run("validate", str(chart))
    assert code == 2
    assert f"helm template triptych {chart} | triptych validate -" in err
    (tmp_path / "kustomization.yaml").write_text("resources: []")
    monkeypatch.setenv("PATH", "")
    code, _, err = run("validate", str(tmp_path))
    assert code == 2
    assert f"kubectl kustomize {tmp_path} | triptych validate -" in err


def test_doctor_prints_findings_and_exits_with_1_for_a_fault(
    run: Run, serve_file: Callable[[object], str]
) -> None:
    path = serve_file({"decode": {"actor": {"num_gpus": 64}}})
    code, out, _ = run("doctor", path, "--json")
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert code == 1
    assert found["GPU"]["status"] == "fault"
    assert found["versions"]["status"] == "ok"
    code, out, _ = run("doctor", path)
    assert code == 1
    assert "set num_gpus to 0" in " ".join(out.split())


def test_validate_looks_at_the_plugins_of_the_decode_step(
    run: Run, serve_file: Callable[[object], str], tmp_path: Path
) -> None:
    """Also beside the compression policy, if the model is on this machine."""
    model = {"model": {"name": str(save_tiny_model(tmp_path))}}
    counting = {"compressor": {"profile": "none", "policy": "diffkv"}}
    both = {"decode": {"plugins": ["soft_prune", "entropy_stop"]}}
    code, out, _ = run("validate", serve_file(model | counting | both))
    assert code == 0
    assert "in a decode step: soft_prune, entropy_stop" in out
    for args, says in (
        (model | both | {"compressor": {"policy": "uniform:k8v4"}}, "'soft_prune' needs 'scores'"),
        ({"decode": {"plugins": ["entropystop"]}}, "did you mean 'entropy_stop'"),
    ):
        code, _, err = run("validate", serve_file(args))
        assert code == 2
        assert says in err.replace("\n", " ")


def test_the_heads_of_a_model_that_finds_nothing_are_not_ranked(run: Run, tmp_path: Path) -> None:
    """Weights are random, so no answer token is found, and every head would be as good."""
    model = save_tiny_model(tmp_path / "tiny")
    asked = ["retrieval", str(model), "--context", "256", "--facts", "2"]
    code, _, err = run(*asked, "--documents", "1", "--output", str(tmp_path / "p.json"))
    assert code == 2
    assert "the model found none of 2 facts in 256 tokens" in err.replace("\n", " ")


def test_a_spread_goes_into_a_profile_that_a_server_takes(run: Run, tmp_path: Path) -> None:
    model, profile, rows = save_tiny_model(tmp_path / "tiny"), tmp_path / "p.json", tmp_path / "r"
    asked = ["spread", str(model), "--context", "256", "--documents", "1", "--steps", "4"]
    code, out, _ = run(*asked, "--output", str(profile), "--json", str(rows))
    assert code == 0
    assert "KV head" in out
    found = json.loads(rows.read_text())["rows"]
    assert [(row["layer"], row["kv_head"]) for row in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert all(row["shares"][0] == 0 and row["shares"][-1] == 1 for row in found)
    assert Profile.read(profile).head_budget_codes
