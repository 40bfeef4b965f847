"""Every script of examples/ starts: it explains itself, or is run by a test of its own."""

import ast
import runpy
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scripts

EXAMPLES = Path(__file__).parents[1] / "examples"
SCRIPTS = {path.stem: path for path in sorted(EXAMPLES.rglob("*.py"))}
START = 'if __name__ == "__main__":'
RUN_WHOLE = ("quickstart", "make_stories_cloze")  # they take no options; others' tests run them


def start(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    """Run a script in this process, as `python SCRIPT ARGUMENTS` would."""
    path = SCRIPTS[name]
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # some set it for processes of their own
    runpy.run_path(str(path), run_name="__main__")


OTHERS = {*RUN_WHOLE, "client_libraries"}  # whose libraries have an environment of their own


@pytest.mark.parametrize(
    "name",
    [name for name, path in SCRIPTS.items() if START in path.read_text() and name not in OTHERS],
)
def test_scripts_explain_themselves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        start(monkeypatch, name, "--help")
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.lower().startswith(f"usage: {name}.py ")
    assert len(shown.splitlines()) > 3, "a sentence"


def test_files_without_a_command_are_imported_by_a_script() -> None:
    helpers = {name for name, path in SCRIPTS.items() if START not in path.read_text()}
    trees = [ast.parse(path.read_text()) for path in SCRIPTS.values()]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in nodes if isinstance(node, ast.Import) for name in node.names}
    assert helpers <= imported


def test_names_are_unique() -> None:
    """A script finds siblings by their names, in whichever folder they are."""
    assert len(SCRIPTS) == len(list(EXAMPLES.rglob("*.py")))
