"""Start of the child process: limits, imports, and failures that are not the file's."""

import json
import resource
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest

from lowbit.formats.errors import ResourceError
from lowbit.formats.text import child
from lowbit.formats.text.template import ChatTemplate
from lowbit.formats.text.tokenizer import load_text_tokenizer
from lowbit.formats.text.worker import Worker

MESSAGES = [{"role": "user", "content": "a"}]
INFINITE = resource.RLIM_INFINITY
BROKEN = {  # jinja2/__init__.py -> what the message says
    "import no_such_module": "No module named 'no_such_module'",
    "raise MemoryError": "out of memory",
    "raise RuntimeError('broken')": "RuntimeError: broken",
    "import os; os._exit(3)": "exit code 3",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
}


def without_packages(monkeypatch: pytest.MonkeyPatch, *first: Path) -> None:
    """Let children import from some folders and the standard library alone."""
    own = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib")]
    own += [str(Path(folder) / "lib-dynload") for folder in own]
    monkeypatch.setattr(sys, "path", [*map(str, first), *own])


@pytest.mark.parametrize("code", BROKEN)
def test_an_import_that_fails_is_not_the_fault_of_the_template(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2").mkdir()
    (tmp_path / "jinja2" / "__init__.py").write_text(code)
    template = ChatTemplate("{{ messages[0].content }}", {})
    with monkeypatch.context() as patch:
        without_packages(patch, tmp_path)
        template.prepare()
        with pytest.raises(ResourceError, match="the process that runs jinja2") as caught:
            template.render(MESSAGES)
        assert BROKEN[code] in str(caught.value)
    assert template.render(MESSAGES) == "a"


def test_an_import_that_fails_is_not_the_fault_of_the_tokenizer(
    small: dict[str, Any], write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    __import__("tokenizers")  # here it is there
    folder = write({**small, "pre_tokenizer": {"type": "Whitespace"}})
    without_packages(monkeypatch)
    with pytest.raises(ResourceError, match=r"runs tokenizers cannot start: .*No module named"):
        load_text_tokenizer(folder)


@pytest.mark.parametrize("program", ["/no/such/program", "/", "/bin/false"])
def test_a_process_that_cannot_start_is_reported_by_the_first_rendering(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate("a", {})
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", program)
        template.prepare()
        template.prepare()
        with pytest.raises(ResourceError, match="start"):
            template.render(MESSAGES)
    assert template.render(MESSAGES) == "a"


@pytest.mark.parametrize("error", [ValueError("current limit exceeds maximum"), OSError()])
def test_a_limit_that_the_system_lacks_is_left_out(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise error

    monkeypatch.setattr(resource, "setrlimit", refuse)
    child.limit(resource.RLIMIT_AS, 1)


@pytest.mark.parametrize(
    ("hard", "wanted", "given"),
    [(INFINITE, 5, 5), (7, 5, 5), (3, 5, 3), (0, 5, 0), (INFINITE, 0, 0)],
)
def test_a_limit_is_never_raised(
    hard: int, wanted: int, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (hard, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: found.append(limits))
    child.limit(resource.RLIMIT_AS, wanted)
    assert found == [(given, given)]


def test_a_process_works_under_a_lower_limit_of_its_parent() -> None:
    job = {"do": "render", "source": "{{ 1 + 1 }}", "values": {}, "most": 9}
    code = (
        "import resource\n"
        "from lowbit.formats.text.worker import Worker\n"
        "resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        f"print(Worker().ask({job!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "2\n", done.stderr


def test_bytecode_of_the_libraries_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = Path(str(jinja2.__file__)).parents[1]
    for name in ("jinja2", "markupsafe"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(packages / name, tmp_path / name, ignore=ignore)
    without_packages(monkeypatch, tmp_path)
    Worker().ask({"do": "compile", "source": "a"})
    stored = {path.name.split(".")[0] for path in (tmp_path / "jinja2").rglob("*.pyc")}
    assert {"sandbox", "ext", "debug", "compiler"} <= stored


def test_jobs_need_no_import_after_the_limits() -> None:
    code = (
        "import json, sys\n"
        "from lowbit.formats.text import child\n"
        "for module in child.LIBRARIES['jinja2']: __import__(module)\n"
        "known = set(sys.modules)\n"
        "job = {'do': 'render', 'seconds': 5, 'values': {}, 'most': 99}\n"
        "serve = child.Handler()\n"
        "for source in ('{{ lipsum(1) and 1 }}', '{% if %}', '{{ x.y.z }}', '{{ {} | tojson }}'):\n"
        "    child.reply(serve, json.dumps({**job, 'source': source}).encode())\n"
        "print(json.dumps([m for m in set(sys.modules) - known if m.startswith('jinja2')]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
