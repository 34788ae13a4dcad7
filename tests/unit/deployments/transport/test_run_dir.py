"""The run directory against real processes: shared while one lives, and gone after the last."""

import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from triptych.core.errors import ConfigError
from triptych.deployments.transport import run_dir
from triptych.deployments.transport.run_dir import RunDir

GUEST = """
import sys
import threading
from pathlib import Path
from triptych.deployments.transport.run_dir import RunDir
stay = RunDir.enter(Path(sys.argv[1]))
print("in", flush=True)
if sys.stdin.readline():
    stay.leave()
    print("left", flush=True)
    sys.stdin.read()
"""

COMER_AND_GOER = """
import sys
import threading
from pathlib import Path
from triptych.deployments.transport.run_dir import RunDir
for _ in range(300):
    stay = RunDir.enter(Path(sys.argv[1]))
    assert (stay.path / "lock").stat().st_nlink == 1, "the directory is gone under its guest"
    stay.leave()
"""


@pytest.fixture(autouse=True)
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return run_dir.base_dir()


@contextmanager
def guest(path: Path) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", GUEST, str(path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        yield process
        process.kill()


def send_home(process: "subprocess.Popen[str]") -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("leave\n")
    process.stdin.flush()
    assert process.stdout.readline() == "left\n"


def test_the_last_to_leave_removes_the_directory() -> None:
    path = run_dir.new_run_dir()
    first = RunDir.enter(path)
    (path / "turns").mkdir()
    (path / "turns" / "next").touch()
    with guest(path) as second:
        first.leave()
        assert path.is_dir()
        send_home(second)
        assert not path.exists()
        assert second.poll() is None
    first.leave()  # twice does no harm


def test_only_the_user_may_enter(base: Path) -> None:
    stay = RunDir.enter(run_dir.new_run_dir())
    assert stat.S_IMODE(stay.path.stat().st_mode) == 0o700
    assert stat.S_IMODE(base.stat().st_mode) == 0o700
    stay.leave()


def test_a_base_that_others_may_enter_is_refused(base: Path) -> None:
    base.mkdir(mode=0o700)
    base.chmod(0o755)
    with pytest.raises(ConfigError, match="mode 0700"):
        RunDir.enter(run_dir.new_run_dir())


def test_a_base_that_is_a_link_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    base.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="mode 0700"):
        RunDir.enter(run_dir.new_run_dir())


def test_only_what_the_dead_left_is_removed(base: Path) -> None:
    dead, living = run_dir.new_run_dir(), run_dir.new_run_dir()
    with ExitStack() as stack:
        killed = stack.enter_context(guest(dead))
        stack.enter_context(guest(living))
        assert run_dir.remove_orphans() == []
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        assert dead.is_dir()
        assert run_dir.remove_orphans() == [dead]
        assert not dead.exists()
        assert living.is_dir()


def test_a_server_that_stops_removes_what_its_killed_processes_left(base: Path) -> None:
    earlier, mine = run_dir.new_run_dir(), run_dir.new_run_dir()
    with ExitStack() as stack:
        stack.enter_context(guest(earlier))
        before = run_dir.all_run_dirs()
        killed = stack.enter_context(guest(mine))
        run_dir.remove_left_over(before, wait_s=0.0)
        assert mine.is_dir()  # a process is still there
        ending = threading.Timer(0.3, killed.kill)
        ending.start()
        run_dir.remove_left_over(before, wait_s=30.0)
        assert not mine.exists()
        assert earlier.is_dir()
        ending.join()


def test_what_has_no_lock_is_not_touched(base: Path) -> None:
    base.mkdir(mode=0o700)
    (base / "app-none-of-ours").mkdir()
    assert run_dir.remove_orphans() == []
    assert (base / "app-none-of-ours").is_dir()


def test_whoever_enters_while_another_leaves_gets_a_whole_directory() -> None:
    path = run_dir.new_run_dir()
    command = [sys.executable, "-c", COMER_AND_GOER, str(path)]
    crowd = [subprocess.Popen(command) for _ in range(3)]
    while any(process.poll() is None for process in crowd):
        run_dir.remove_orphans()
    assert [process.returncode for process in crowd] == [0, 0, 0]
    assert not path.exists()


OWNER = """
import sys
import threading
from pathlib import Path
from triptych.deployments.transport.run_dir import RunDir
with RunDir.enter(Path(sys.argv[1])).only_one("pool"):
    print("alone", flush=True)
    sys.stdin.read()
"""


def test_only_one_process_has_a_role_until_it_dies(tmp_path: Path) -> None:
    stay = RunDir.enter(tmp_path / "app-1")
    command = [sys.executable, "-c", OWNER, str(stay.path)]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as previous_worker,
        ThreadPoolExecutor(1) as threads,
    ):
        assert previous_worker.stdout is not None
        assert previous_worker.stdout.readline() == b"alone\n"

        def have_it() -> None:
            with stay.only_one("pool"):
                pass

        waiting = threads.submit(have_it)
        with stay.only_one("router"):
            assert not wait([waiting], timeout=0.3).done
        previous_worker.kill()
        previous_worker.wait()
        waiting.result(timeout=10)
    stay.leave()
    assert not stay.path.exists()
