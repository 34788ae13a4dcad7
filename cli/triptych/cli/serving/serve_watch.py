"""The process that waits for ``serve run``: passes signals on, and removes what it left.

``triptych serve`` becomes this process once it has read the model for its panel, since torch and
what else that took would stay in its memory, 280 MB, as long as the server runs. Usage: ``python -m
triptych.cli.serving.serve_watch CONFIG SECONDS TEMPORARY CHILD DIRECTORY ...``: how long running
requests may take at the end, a directory that only the server needs or "", a child process that
compiles kernels or 0, and where arenas are.
"""

import sys
from pathlib import Path
from shutil import rmtree

from triptych.cli.serving.child import run_interruptible, wait_for
from triptych.deployments.transport import run_dir


def main() -> None:
    config, seconds, temporary, compiling, *arenas = sys.argv[1:]
    if int(compiling):
        wait_for(int(compiling))
    before = run_dir.all_run_dirs()
    module = [sys.executable, "-m", "triptych.deployments.serve_run"]
    try:
        status = run_interruptible([*module, config, seconds])
        run_dir.remove_left_over(before)
        # Its memory, 20 MB, would stay as long as the server runs.
        from triptych.kvpool.pool.arena import remove_orphans

        # A pool that ends while it starts leaves its pages in shared memory.
        for directory in arenas:
            remove_orphans(Path(directory))
    finally:
        if temporary:
            rmtree(temporary, ignore_errors=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
