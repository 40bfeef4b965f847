"""Completion in a real bash, in a pseudo-terminal."""

import os
import pty
import select
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BASH = shutil.which("bash")
PATIENCE_S = 60  # for a shell that hangs
LISTED = (  # so many names are listed at once, with no question and no colours
    "set completion-query-items 0",
    "set page-completions off",
    "set enable-bracketed-paste off",
    "set bell-style none",
    "set show-all-if-ambiguous on",
)
pytestmark = [
    pytest.mark.commands,
    pytest.mark.skipif(BASH is None, reason="bash is not installed"),
]


class Shell:
    """An interactive bash that completes lines of one program and prints the words it was given."""

    def __init__(self, folder: Path, program: str) -> None:
        self.end, inner = pty.openpty()
        (folder / ".inputrc").write_text("\n".join(LISTED))
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(folder),
            "INPUTRC": str(folder / ".inputrc"),
            "TERM": "dumb",
            "COLUMNS": "200",
            "PS1": "",
        }
        self.process = subprocess.Popen(
            [str(BASH), "--norc", "--noprofile", "-i"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env=environment,
            cwd=folder,
            start_new_session=True,
        )
        os.close(inner)
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        self.send("PS1=; stty -echo; unset PROMPT_COMMAND\n")
        self.send(f'eval "$({variable}=bash_source {program})"\n')
        self.send(f"{program}() {{ printf '<%s>' \"$@\"; echo; }}\n")
        self.send("echo rea''dy\n")
        self.read_until("ready\r\n")

    def send(self, text: str) -> None:
        os.write(self.end, text.encode())

    def read_until(self, mark: str) -> str:
        seen = b""
        while mark.encode() not in seen:
            assert select.select([self.end], [], [], PATIENCE_S)[0], seen
            seen += os.read(self.end, 4096)
        return seen.decode()

    def after_tab(self, line: str) -> str:
        """Completions offered for a line, and the words that Enter passes to the program."""
        self.send(f"{line}\t\n")
        return self.read_until(">\r\n")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.end)


@pytest.mark.parametrize(
    ("program", "lines"),
    [
        (
            "lowbit-run",
            {
                "eva": "<evaluate>",
                "mod": "<model-int4/>",
                "x --device=cu": "<x><--device=cuda>",
                "model-int4 --out not": "<model-int4><--out><notes.txt>",
            },
        ),
        (
            "lowbit-convert",
            {
                "ins": "<inspect>",
                "x y --method abs": "<x><y><--method><absmax>",
                "x y --method=gptq+rotate+a": "<x><y><--method=gptq+rotate+autoround>",
            },
        ),
    ],
)
def test_words_folders_and_values(tmp_path: Path, program: str, lines: dict[str, str]) -> None:
    (tmp_path / "model-int4").mkdir()
    (tmp_path / "notes.txt").touch()
    shell = Shell(tmp_path, program)
    try:
        found = {line: shell.after_tab(f"{program} {line}").strip() for line in lines}
    finally:
        shell.close()
    assert found == lines


def test_commands_and_folders_together(tmp_path: Path) -> None:
    (tmp_path / "ser-int4").mkdir()
    shell = Shell(tmp_path, "lowbit-run")
    try:
        offered = shell.after_tab("lowbit-run ser")
    finally:
        shell.close()
    assert offered.split() == ["serve", "ser-int4/", "<ser>"]
