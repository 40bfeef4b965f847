"""Windows and macOS, simulated on Linux by taking away what their Python lacks."""

import ast
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import lowbit.runtime
from lowbit.convert.cli.main import main as convert_main
from lowbit.formats.errors import LowbitError
from lowbit.formats.machine import memory
from lowbit.formats.machine.cores import core_count
from lowbit.formats.safetensors import checkpoint
from lowbit.formats.shell import entry
from lowbit.runtime.cli.main import main as run_main
from lowbit.runtime.lab import checks

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "examples" / "models" / "tiny-qwen3"
MODULES = {"fcntl", "grp", "pty", "pwd", "resource", "termios", "tty"}  # that Windows lacks
LACKED = {  # names of `os`, `signal` and `socket` there
    *("CMSG_LEN", "CMSG_SPACE", "MSG_CMSG_CLOEXEC", "SCM_RIGHTS"),
    *("O_CLOEXEC", "O_NONBLOCK", "posix_fallocate", "preadv", "pread", "pwrite", "set_blocking"),
    *("SIGALRM", "SIGHUP", "SIGKILL", "SIGPIPE", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIG_UNBLOCK"),
    *("setitimer", "getitimer", "pthread_sigmask", "sched_getaffinity", "sysconf"),
}


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when a module is imported: those outside of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield node
            yield from at_import(node)


def lacking_on_windows(text: str) -> set[str]:
    """Modules and names that an import of a module needs, and that Windows does not have."""
    found: set[str] = set()
    if not any(name in text for name in (*MODULES, *LACKED)):
        return found
    for node in at_import(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} & MODULES
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} & LACKED if node.value.id in ("os", "signal", "socket") else set()
    return found


def test_modules_import_on_windows() -> None:
    assert lacking_on_windows("import fcntl\nLEFT = 128 + signal.SIGPIPE") == {"fcntl", "SIGPIPE"}
    assert lacking_on_windows("def f():\n    import fcntl\n    os.preadv") == set()
    for room in ("convert", "formats", "runtime"):
        for path in (ROOT / room).rglob("*.py"):
            assert lacking_on_windows(path.read_text()) == set(), path


def test_commands_on_windows_name_wsl(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as ended:
        entry.run("no.such.module", "lowbit-run")
    assert ended.value.code == 1
    assert capsys.readouterr().err == (
        "Error: lowbit runs on Linux and macOS, not on Windows itself\n\n"
        "hint: install it in WSL 2 (`wsl --install`), where the converter, the CPU runtime and "
        "NVIDIA GPUs work as on Linux\n"
    )


def test_python_on_windows_names_wsl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(LowbitError, match="not on Windows itself") as caught:
        lowbit.runtime.load(MODEL)
    assert "WSL 2" in str(caught.value.hint)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without /proc, Triton and the calls of Linux."""
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 10)
    for module, name in (
        *((memory, "PROCESSES"), (memory, "STATM"), (memory, "MEMINFO"), (memory, "CGROUP")),
        (checks, "DRIVER"),
    ):
        monkeypatch.setattr(module, name, tmp_path / "absent")
    monkeypatch.setitem(sys.modules, "triton", None)


@pytest.mark.usefixtures("mac")
def test_conversion_and_answer_on_a_mac(tmp_path: Path) -> None:
    out = tmp_path / "out"
    cpu = ("--device", "cpu")
    done = CliRunner().invoke(convert_main, [str(MODEL), str(out), "--method", "rtn", *cpu])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(run_main, [str(out), "--raw", "-n", "4", *cpu, "Once upon a time"])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize(
    ("free", "shards"),
    [(1000, ()), (4_000_000, ("--max-shard-size", "2MB"))],  # any one of which would fit
)
def test_full_disk_on_a_mac_is_found_before_the_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, shards: tuple[str, ...]
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    out = tmp_path / "out"
    done = CliRunner().invoke(convert_main, [str(MODEL), str(out), "--method", "rtn", *shards])
    assert done.exit_code == 1
    assert "the disk is full" in done.stderr
    assert not out.exists()


@pytest.mark.usefixtures("mac")
def test_memory_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert memory.resident_bytes() >= peak * 1024
    monkeypatch.setattr(sys, "platform", "darwin")
    assert peak <= memory.resident_bytes() < 2 * peak  # bytes there
    assert memory.free_bytes("cpu") is None
    assert core_count() == 10


def test_resident_memory_is_what_the_system_counts() -> None:
    """In a process of its own, in which nothing else takes or frees memory, torch neither."""
    code = (
        "import sys, types\n"
        "sys.modules['torch'] = types.ModuleType('torch')\n"
        "from lowbit.formats.machine.memory import peak_resident_bytes, resident_bytes\n"
        "before = resident_bytes()\n"
        "held = b'x' * 50_000_000\n"
        "print(before, resident_bytes(), peak_resident_bytes())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, now, peak = map(int, done.stdout.split())
    assert 49_000_000 < now - before < 55_000_000
    assert peak > 0.95 * now  # some pages are counted late, and those of the parent before exec


def test_reads_stay_below_what_macos_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint.MOST_AT_ONCE < 2**31
    asked: list[int] = []
    preadv = os.preadv

    def watched(descriptor: int, views: list[memoryview], offset: int) -> int:
        asked.append(sum(map(len, views)))
        return preadv(descriptor, views, offset)

    monkeypatch.setattr(os, "preadv", watched)
    monkeypatch.setattr(checkpoint, "MOST_AT_ONCE", 1000)
    path = MODEL / "model.safetensors"
    out = torch.empty(2500, dtype=torch.uint8)
    checkpoint.read_at(path, 7, out)
    assert asked == [1000, 1000, 500]
    assert bytes(out.tolist()) == path.read_bytes()[7:2507]
