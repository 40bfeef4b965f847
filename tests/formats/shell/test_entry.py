"""Signals as real processes meet them: while importing, in the middle of a command, and ignored.

The processes send themselves the signal, so that nothing waits for anything.
"""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENTRY = "from lowbit.formats.shell.entry import run; run('stub', 'program')"
SELF = "import os, signal\nkill = lambda number: os.kill(os.getpid(), number)\n"

# How an interrupt can fare inside an import.
IMPORTS = {
    "raised": "kill(signal.SIGINT)",
    "before the handlers": "raise KeyboardInterrupt",
    "turned into an ImportError": (
        "try: kill(signal.SIGINT)\nexcept KeyboardInterrupt: raise ImportError('numpy') from None"
    ),
    "turned into a SystemError": (
        "try: kill(signal.SIGINT)\n"
        "except KeyboardInterrupt as error: raise SystemError() from error"
    ),
    "swallowed": (
        "try: kill(signal.SIGINT)\nexcept KeyboardInterrupt: pass\n"
        "while True: pass  # until it is raised again"
    ),
    "swallowed with a fallback": (
        "def attempt():\n"
        "    try: kill(signal.SIGINT)\n"
        "    except KeyboardInterrupt: return None\n"
        "attempt()\n"
        "main = lambda **_: [None for _ in iter(int, 1)]"
    ),
}


def start(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run code beside a stub module, with signals as a shell's foreground has them."""
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def stub(folder: Path, body: str) -> None:
    (folder / "stub.py").write_text(SELF + body)


@pytest.mark.parametrize("body", IMPORTS.values(), ids=IMPORTS)
def test_an_interrupt_during_an_import_ends_with_130(tmp_path: Path, body: str) -> None:
    stub(tmp_path, body)
    done = start(ENTRY, tmp_path)
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("", "\ninterrupted\n")


def test_an_error_of_an_import_stays_an_error(tmp_path: Path) -> None:
    stub(tmp_path, "raise ImportError('no such library')")
    done = start(ENTRY, tmp_path)
    assert done.returncode == 1
    assert "ImportError: no such library" in done.stderr
    assert "interrupted" not in done.stderr


def test_sigterm_unwinds_and_ends_with_143(tmp_path: Path) -> None:
    body = "def main(**_):\n    try: kill(signal.SIGTERM)\n    finally: print('closed')"
    stub(tmp_path, body)
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (143, "closed\n", "")


def test_cleaning_up_after_an_interrupt_is_not_interrupted(tmp_path: Path) -> None:
    slow = "for number in range(4_000_000): last = number"  # longer than the time to insist
    stub(tmp_path, f"try: kill(signal.SIGINT)\nfinally:\n    {slow}\n    print('closed', last)")
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stdout) == (130, "closed 3999999\n")


@pytest.mark.parametrize("times", [1, 2])
def test_impatience_after_an_interrupt(tmp_path: Path, times: int) -> None:
    again = "; ".join(["kill(signal.SIGINT)"] * times)
    body = f"def main(**_):\n    try: kill(signal.SIGINT)\n    finally: {again}; print('closed')"
    stub(tmp_path, body)
    done = start(ENTRY, tmp_path)
    closed = ("closed\n", "\ninterrupted\n") if times == 1 else ("", "")
    assert (done.returncode, done.stdout, done.stderr) == (130, *closed)


def test_signals_that_are_ignored_stay_ignored(tmp_path: Path) -> None:
    stub(
        tmp_path, "def main(**_):\n    kill(signal.SIGINT)\n    kill(signal.SIGTERM)\n    print(1)"
    )
    ignore = "import signal; [signal.signal(n, signal.SIG_IGN) for n in (2, 15)]\n"
    done = start(ignore + ENTRY, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


def test_the_exit_code_is_that_of_main(tmp_path: Path) -> None:
    stub(tmp_path, "import sys\ndef main(prog_name):\n    sys.exit(f'{prog_name} failed')")
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stderr) == (1, "program failed\n")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_characters_that_stdout_lacks_are_escaped(tmp_path: Path, encoding: str) -> None:
    stub(tmp_path, "def main(**_):\n    print('\\u2713 \\xe9 \\udc80')")
    done = start(f"import sys; sys.stdout.reconfigure(encoding='{encoding}')\n" + ENTRY, tmp_path)
    assert done.returncode == 0
    assert "\\udc80" in done.stdout


@pytest.mark.parametrize(
    "command",
    [("convert", "inspect", "x"), ("run", "org/x", "Hi"), ("convert", "x", "y", "--bits", "z")],
)
def test_both_programs_survive_an_interrupt_while_torch_is_imported(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    (tmp_path / "torch.py").write_text(SELF + IMPORTS["raised"])
    room = {"convert": "convert", "run": "runtime"}[command[0]]
    code = (
        f"import sys; sys.argv = {['program', *command[1:]]!r}\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from lowbit.{room}.__main__ import main; main()"
    )
    done = start(code, tmp_path)
    assert done.returncode == 130
    assert (done.stdout, done.stderr) == ("", "\ninterrupted\n")
