"""Speed on this machine and scores on tasks of a packed folder, as `lowbit-run` measures them.

The runtime is another program, which this one starts: it leaves bench.json and tasks.json.
"""

import subprocess
import sys
from pathlib import Path

from lowbit.formats.errors import ResourceError
from lowbit.formats.file_names import BENCH_FILE
from lowbit.formats.files.atomic import check_place, replace_file
from lowbit.formats.tasks import TASKS_FILE

PROGRAM = "lowbit.runtime"


def measure_speed(folder: Path, device: str) -> None:
    """Measure the speed on this machine, and keep it in bench.json.

    Args:
        folder: packed.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ResourceError: it cannot be measured, or the file cannot be written.
    """
    check_place(folder / BENCH_FILE)
    replace_file(folder / BENCH_FILE, _run("bench", folder, "--device", device))


def score_tasks(folder: Path, tasks: str, device: str) -> None:
    """Score a folder on tasks, with commas between them, and keep the results in tasks.json.

    Raises:
        ResourceError: a task that is not known, or a library that is missing.
    """
    check_place(folder / TASKS_FILE)
    _run("evaluate", folder, "--tasks", tasks, "--device", device)


def _run(command: str, folder: Path, *options: str) -> bytes:
    """Output of a command with --json; its messages go to stderr as they come."""
    words = [sys.executable, "-m", PROGRAM, command, str(folder), *options, "--json"]
    done = subprocess.run(words, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise ResourceError(
            f"`lowbit-run {command} {folder}` ended with {done.returncode}",
            hint="its message is above",
        )
    return done.stdout
