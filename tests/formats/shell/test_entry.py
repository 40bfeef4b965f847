"""Signals as real processes meet them: while importing, in the middle of a command, and ignored.

The processes send themselves the signal, so that nothing waits for anything.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from lowbit.formats.shell.commands import Commands
from tests.lanes import in_commands

ENTRY = "from lowbit.formats.shell.entry import run; run('stub', 'program')"
SELF = "import os, signal\nkill = lambda number: os.kill(os.getpid(), number)\n"

# What C++ code does about an exception of Python code that it calls.
FOREIGN = """\
def call():
    try: kill(signal.{})
    except BaseException: os.abort()
call()
print('imported')
"""
ENDLESS = "def main(**_):\n    while True: pass\n"
# A program whose command prints by click, by rich, and by Python, which writes at the end.
PRINTS = """\
import click
from lowbit.formats.shell.commands import Commands
from lowbit.formats.shell.output import note, print_json
from lowbit.formats.shell.tables import results
WAYS = {'click': click.echo, 'json': print_json, 'rich': results().print, 'python': print}
main = Commands('main', default='show')
@main.command()
@click.argument('way')
def show(way):
    note('aside')
    WAYS[way]({})
"""
ENDS = {"SIGINT": (130, "\ninterrupted\n"), "SIGTERM": (143, "")}


def start(code: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run code beside a stub module, with signals as a shell's foreground has them."""
    # A program inherits that a signal is ignored, and no handler. Python between fork and exec may
    # wait for ever for a lock that another thread of this process has.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=folder,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=60,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def stub(folder: Path, body: str) -> None:
    (folder / "stub.py").write_text(SELF + body)


@pytest.mark.parametrize("name", ENDS)
def test_signals_wait_for_the_end_of_an_import(tmp_path: Path, name: str) -> None:
    stub(tmp_path, FOREIGN.format(name) + "main = lambda **_: print('begun')")
    done = start(ENTRY, tmp_path)
    code, said = ENDS[name]
    assert (done.returncode, done.stdout, done.stderr) == (code, "imported\n", said)


@pytest.mark.parametrize("name", ENDS)
def test_signals_wait_for_the_end_of_an_import_inside_a_command(tmp_path: Path, name: str) -> None:
    (tmp_path / "slow.py").write_text(SELF + FOREIGN.format(name))
    stub(tmp_path, ENDLESS.replace("while", "import slow\n    while"))
    done = start(ENTRY, tmp_path)
    code, said = ENDS[name]
    assert (done.returncode, done.stdout, done.stderr) == (code, "imported\n", said)


@pytest.mark.parametrize("name", ENDS)
def test_an_import_that_does_not_end_is_given_up(tmp_path: Path, name: str) -> None:
    stub(tmp_path, f"kill(signal.{name})\nwhile True: pass")
    hasty = "import lowbit.formats.shell.entry as entry; entry.PATIENCE_S = 0.05\n"
    done = start(hasty + ENTRY, tmp_path)
    assert (done.returncode, done.stderr) == ENDS[name]


def test_impatience_during_an_import(tmp_path: Path) -> None:
    stub(tmp_path, "for _ in range(3): kill(signal.SIGINT)\nwhile True: pass")
    assert start(ENTRY, tmp_path).returncode == 130


def test_an_interrupt_wins_over_an_error_behind_it(tmp_path: Path) -> None:
    stub(tmp_path, "kill(signal.SIGINT)\nraise ImportError('half a library')")
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


def test_an_interrupt_before_the_handlers_ends_with_130(tmp_path: Path) -> None:
    stub(tmp_path, "raise KeyboardInterrupt")
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stderr) == (130, "\ninterrupted\n")


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
    again = "kill(signal.SIGINT); import json; print('closed')"
    stub(tmp_path, f"def main(**_):\n    try: kill(signal.SIGINT)\n    finally: {again}")
    done = start(ENTRY, tmp_path)
    assert (done.returncode, done.stdout) == (130, "closed\n")


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


# torch begins to be imported, is interrupted, and goes on to its end; it then lacks everything.
TORCH = SELF + FOREIGN.format("SIGINT")


@pytest.mark.parametrize(
    "command",
    [("convert", "inspect", "x"), ("run", "org/x", "Hi")],
    ids=" ".join,
)
def test_an_interrupt_while_torch_is_imported(tmp_path: Path, command: tuple[str, ...]) -> None:
    """However slow the machine: only the end of the import lets the signal through."""
    (tmp_path / "torch.py").write_text(TORCH)
    room = {"convert": "convert", "run": "runtime"}[command[0]]
    code = (
        "import lowbit.formats.shell.entry as entry; entry.PATIENCE_S = 60\n"
        f"import sys; sys.argv = {['program', *command[1:]]!r}\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        f"from lowbit.{room}.__main__ import main; main()"
    )
    done = start(code, tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (130, "imported\n", "\ninterrupted\n")


def test_an_interrupt_while_the_command_line_is_read() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    option = click.Option(["--now"], callback=interrupt)
    found = CliRunner().invoke(Commands("group", params=[option]), ["--now", "x"])
    assert (found.exit_code, found.stderr) == (130, "\ninterrupted\n")


def redirected(
    folder: Path, line: tuple[str, ...], redirections: str, **environment: str
) -> "subprocess.CompletedProcess[str]":
    """Run the program of PRINTS; `$nobody` among the redirections is a pipe that nobody reads."""
    stub(folder, PRINTS)
    code = f"import sys; sys.argv = {['program', *line]!r}; {ENTRY}"
    reading, writing = os.pipe()
    os.close(reading)
    shell = f'nobody={writing}; exec "$0" -c "$1" {redirections}'
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, code],
        cwd=folder,
        env=os.environ | {"PYTHONUNBUFFERED": ""} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        pass_fds=[writing],
    )
    os.close(writing)
    return done


@in_commands("line1-*", "line3-*")
@in_commands("line[024]-*->&-", "line[135]-*nobody")
@pytest.mark.parametrize("redirections", [">&$nobody", ">&-"])
@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        (("click",), 141, "aside\n"),
        (("json",), 141, "aside\n"),
        (("rich",), 0, "aside\n"),  # which prints behind the work
        (("python",), 0, "aside\n"),
        (("--help",), 141, ""),
        (("show", "--help"), 141, ""),
    ],
)
def test_results_that_nobody_reads(
    tmp_path: Path, redirections: str, line: tuple[str, ...], code: int, said: str
) -> None:
    done = redirected(tmp_path, line, redirections)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", said)


@pytest.mark.parametrize("redirections", [">&$nobody", ">&-"])
def test_completion_that_nobody_reads(tmp_path: Path, redirections: str) -> None:
    done = redirected(tmp_path, (), redirections, _PROGRAM_COMPLETE="bash_source")
    assert (done.returncode, done.stdout, done.stderr) == (141, "", "")


@pytest.mark.parametrize(
    ("line", "redirections", "code", "result"),
    [
        (("click",), "2>&-", 0, "{}\n"),  # whoever closes it wants no messages
        (("click",), "2>&$nobody", 141, ""),
        (("--none",), "2>&-", 2, ""),
        (("--none",), "2>&$nobody", 141, ""),
        (("click",), "<&-", 0, "{}\n"),
        (("click",), "<&- >&- 2>&-", 141, ""),
    ],
)
def test_other_streams_that_are_closed(
    tmp_path: Path, line: tuple[str, ...], redirections: str, code: int, result: str
) -> None:
    done = redirected(tmp_path, line, redirections)
    assert (done.returncode, done.stdout) == (code, result)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirections", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path: Path, redirections: str) -> None:
    """What a library prints would be written into them."""
    stub(tmp_path, "def main(**_):\n    assert open('new', 'w').fileno() > 2\n    kill(9)")
    shell = f'exec "$0" -c "$1" {redirections}'
    done = subprocess.run(["sh", "-c", shell, sys.executable, ENTRY], cwd=tmp_path, timeout=60)
    assert done.returncode == -signal.SIGKILL
