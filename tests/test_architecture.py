"""The shape of the tree: who imports whom, what ships, what an import loads, how long files are."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lowbit.convert.export.architectures import EXPORTED
from lowbit.formats.architectures import ARCHITECTURES, MIXTURES
from lowbit.runtime.models.architectures import BUILD, HEADS

ROOT = Path(__file__).parents[1]
ROOMS = ("convert", "formats", "runtime")
SEEING = ROOT / "examples" / "models" / "tiny-qwen3.5-vision"
IMPORTED_AS = {"pillow": "PIL", "pyyaml": "yaml"}  # distributions that are named otherwise
MAY_IMPORT = {
    "formats": {"formats"},
    "convert": {"convert", "formats"},
    "runtime": {"runtime", "formats"},
}
SHELL = ROOT / "formats" / "shell"  # which alone in formats may import these
KERNELS = {"columns_cuda.py", "metrics_cuda.py", "search_cuda.py"}  # alone in convert with triton
SHELL_IMPORTS = {"click", "click_default_group", "rich"}
NEVER_IMPORTS = {
    "formats": {*SHELL_IMPORTS, "compressed_tensors", "numpy", "transformers", "triton"},
    "convert": {"compressed_tensors", "triton"},
    "runtime": {"compressed_tensors", "matplotlib", "transformers"},
}
# Packages, and the modules beside them, that may import those before them only.
ORDER = {
    "convert": [
        *(
            "original",
            "plan",
            "texts",
            "quantize",
            "budget",
            "mtp",
            "measure",
            "pipeline",
            "report",
        ),
        *("export", "vocabulary", "publish", "api", "cli"),
    ],
    "formats": [
        *("printable", "charts", "errors", "fields", "machine", "kv_cache", "page_counts"),
        "sequence_counts",
        *("activation_modes", "activations"),
        "architectures",
        *("files", "image_settings"),
        "sampling_ranges",
        *("layout", "safetensors", "hub", "shell", "text", "foreign", "generation", "tasks"),
        *("kept_vocabulary", "head_rows", "draft_head", "frequent_rows", "row_folders"),
        *("file_names", "folder_size", "judgement", "weight_bits"),
        "packed",
    ],
    "runtime": [
        *("images", "text", "thresholds", "state", "weights", "kernels", "backends", "models"),
        *("engine", "evaluate", "serve", "conversation", "lab", "cli"),
    ],
}
FAMILY_FOLDERS = ("formats/architectures", "runtime/models", "convert/export/architectures")
MAX_LINES = 500


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|.+)|import (.+))$", re.MULTILINE)
NAME = re.compile(r"(\w[\w.]*)(?: as \w+)?(?: *#.*)?(?:,\s*|\s*\)|$)")


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of everything a file imports, inside functions too, by the formatter's layout.

    Parsing the tree would take seconds.
    """
    found: set[str] = set()
    for module, names, modules in IMPORT.findall(path.read_text()):
        listed = NAME.findall(names.lstrip("(") or modules)
        found.update(f"{module}.{name}" if module else name for name in listed)
    return frozenset(found)


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


@pytest.mark.parametrize("own_room", ROOMS)
def test_imports_point_at_formats(own_room: str) -> None:
    for path in sources(own_room):
        names = [name.split(".") for name in imports(path)]
        own = {name[1] for name in names if name[0] == "lowbit"}
        assert own <= MAY_IMPORT[own_room], path
        others = {name[0] for name in names}
        if SHELL in path.parents:
            others -= SHELL_IMPORTS
        if path.name in KERNELS:
            others -= {"triton"}
        assert not others & NEVER_IMPORTS[own_room], path
        # Under the bare name of its folder a room would be imported as a second copy.
        assert not others & set(ROOMS), path


@pytest.mark.parametrize("room", ORDER)
def test_packages_import_those_below_them(room: str) -> None:
    order = ORDER[room]
    for path in sources(room):
        own = path.relative_to(ROOT / room).with_suffix("").parts[0]
        if own.startswith("__"):
            continue
        names = [name.split(".") for name in imports(path)]
        used = {name[2] for name in names if name[:2] == ["lowbit", room] and name[2] != own}
        assert {name for name in used if order.index(name) > order.index(own)} == set(), path


def imports_at_work(node: ast.AST) -> set[str]:
    """Dotted names of everything that is imported, but for types alone."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in names_in(child.test):
            continue
        if isinstance(child, ast.ImportFrom):
            found.update(f"{child.module}.{alias.name}" for alias in child.names)
        found |= imports_at_work(child)
    return found


def test_modules_of_the_engine_import_in_no_circle_but_of_types() -> None:
    files = {
        ".".join(("lowbit", *path.relative_to(ROOT).with_suffix("").parts)): path
        for path in sources("runtime/engine")
    }
    left = {
        module: {name.rpartition(".")[0] for name in imports_at_work(ast.parse(path.read_text()))}
        & files.keys()
        for module, path in files.items()
    }
    while leaves := [module for module, used in left.items() if not used & left.keys()]:
        for module in leaves:
            del left[module]
    assert not left


def test_load_alone_knows_where_drafts_come_from() -> None:
    """The engine asks a `DraftSource`; what it is, is chosen where a model is loaded.

    `fake_gpu` stands in for `load`, with tensors without data.
    """
    found = {
        str(path.relative_to(ROOT))
        for path in sources("runtime")
        if path.parent.name != "draft" and any(".engine.draft." in name for name in imports(path))
    }
    assert found == {"runtime/engine/load.py", "runtime/lab/fake_gpu.py"}


def test_state_alone_knows_how_pages_hold_numbers() -> None:
    """All others take the views and sizes that `KVPages` gives."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sources("runtime")
        if path.parent.name != "state" and re.search(r"\.[kv]\b", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute)
        and node.attr in ("k", "v")
        and "pages" in names_in(node.value)
    ]
    assert not found


def families() -> list[str]:
    """File names of the families of models."""
    tables = sources("formats/architectures")
    return [path.name for path in tables if "\nARCHITECTURE = " in path.read_text()]


def outside_families() -> list[Path]:
    """Modules that are not of one family: its files begin with its name."""
    stems = [Path(name).stem for name in families()]
    own = {
        path
        for folder in FAMILY_FOLDERS
        for stem in stems
        for path in (ROOT / folder).glob(f"{stem}*.py")
    }
    return [path for path in sources(*ROOMS, "examples") if path not in own]


def names_in(node: ast.AST) -> set[str]:
    """Every name and attribute in an expression."""
    nodes = list(ast.walk(node))
    plain = {part.id for part in nodes if isinstance(part, ast.Name)}
    return plain | {part.attr for part in nodes if isinstance(part, ast.Attribute)}


def is_config(node: ast.ClassDef) -> bool:
    """Tell if a class is `Config` of all families, or one family's."""
    return any(name.endswith("Config") for base in node.bases for name in names_in(base))


def test_no_module_compares_configs_of_families() -> None:
    """What others need of a family is data, or a function, in the family's own files."""
    trees = [ast.parse((ROOT / FAMILY_FOLDERS[0] / name).read_text()) for name in families()]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    configs = {node.name for node in classes if is_config(node)}
    assert len(configs) >= len(families()) >= 2
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in outside_families()
        if re.search(r"isinstance\(.*Config", text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Call) and "isinstance" in names_in(node.func))
        and any(names_in(argument) & configs for argument in node.args[1:])
    ]
    assert not found


def test_only_the_tables_of_families_import_them() -> None:
    modules = {
        f"lowbit.{folder.replace('/', '.')}.{Path(name).stem}"
        for folder in FAMILY_FOLDERS
        for name in families()
    }
    found = {
        str(path.relative_to(ROOT))
        for path in outside_families()
        for name in imports(path)
        if name in modules or name.rpartition(".")[0] in modules
    }
    assert found == {
        "formats/architectures/__init__.py",
        "convert/export/architectures/__init__.py",
        "runtime/models/architectures.py",
    }


def test_every_table_of_families_has_all() -> None:
    assert BUILD.keys() == ARCHITECTURES.keys() == EXPORTED.keys() | set(MIXTURES)
    assert HEADS.keys() == {name for name, family in ARCHITECTURES.items() if family.mtp_layers}
    for model_type, exported in EXPORTED.items():
        assert exported.gguf.names.keys() == set(ARCHITECTURES[model_type].model_types)


def test_every_import_is_declared() -> None:
    project = pyproject()["project"]
    declared = list(project["dependencies"])
    for extra in project.get("optional-dependencies", {}).values():
        declared += extra
    names = {re.split(r"[<>=!~;\[ ]", requirement)[0] for requirement in declared}
    modules = {IMPORTED_AS.get(name, name.replace("-", "_")) for name in names}
    known = {"lowbit", *sys.stdlib_module_names} | modules
    imported = {name.split(".")[0] for path in sources(*ROOMS) for name in imports(path)}
    assert imported <= known


def test_every_package_ships() -> None:
    packages = pyproject()["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).parts for path in sources(*ROOMS)}
    for parts in folders:
        assert ROOT.joinpath(*parts, "__init__.py").is_file()
    # Folders of data alone are packages to setuptools, which warns of those that are not named.
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*") if path.is_file()]
    folders |= {
        path.parent.relative_to(ROOT).parts for path in files if path.parent.name != "__pycache__"
    }
    assert sorted(packages) == sorted(".".join(("lowbit", *parts)) for parts in folders)


def test_rooms_are_typed_and_have_no_common_init() -> None:
    for name in ROOMS:
        assert (ROOT / name / "py.typed").is_file()
    assert not (ROOT / "__init__.py").exists()


def modules_of_formats() -> list[str]:
    dotted = (
        ".".join(("lowbit", *path.relative_to(ROOT).with_suffix("").parts))
        for path in sources("formats")
        if SHELL not in path.parents
    )
    return [name.removesuffix(".__init__") for name in dotted]


def test_importing_loads_little() -> None:
    """In one process: what the second import may not load, the first has not loaded either."""
    steps: list[tuple[list[str], set[str]]] = [
        (modules_of_formats(), {"click", "huggingface_hub", "rich", "transformers", "triton"}),
        (
            ["lowbit.runtime", "lowbit.runtime.cli.main"],
            {"huggingface_hub", "jinja2", "matplotlib", "prompt_toolkit", "wcwidth"},
        ),
        # Where Triton is not to be had, the CPU runs all the same.
        (
            ["lowbit.runtime.engine.load", "lowbit.runtime.lab.bench"],
            {"lowbit.convert", "transformers", "triton"},
        ),
        (["lowbit.convert"], {"matplotlib", "transformers", "triton"}),
        # The engine of a server has a process of its own, which speaks no HTTP.
        (
            ["lowbit.runtime.serve.link.process", "lowbit.runtime.serve.link.host"],
            {"fastapi", "pydantic", "starlette", "uvicorn"},
        ),
    ]
    code = "import sys\n"
    for modules, absent in steps:
        code += f"import {', '.join(modules)}\n"
        code += f"print(sorted(set({sorted(absent)}) & sys.modules.keys()))\n"
    code += "print(sys.modules['torch'].cuda.is_initialized())\n"
    # Room for sequences is counted on meta tensors, some of whose operations import sympy: 0.8 s.
    code += "from lowbit.runtime.state.sampler import new_sampler_rows\n"
    code += "new_sampler_rows(2, 300, 'meta')\nprint('sympy' in sys.modules)\n"
    # A model that sees needs Pillow for pictures alone.
    code += f"model = lowbit.runtime.load({str(SEEING)!r}, device='cpu')\n"
    code += "model.generate('Hi', max_new_tokens=1)\nprint('PIL' in sys.modules)\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n") == ["[]"] * len(steps) + ["False", "False", "False", ""]


HEAVY = ("huggingface_hub", "jinja2", "numpy", "rich", "tokenizers", "torch", "transformers")


@pytest.mark.parametrize(("name", "group"), [("convert", "cli.main"), ("runtime", "cli.main")])
def test_help_and_completion_load_little(name: str, group: str) -> None:
    """The help of every command, and completion after options whose values are parsed."""
    code = (
        "import sys, click\n"
        "from click.shell_completion import BashComplete\n"
        f"import lowbit.{name}.__main__\n"
        f"from lowbit.{name}.{group} import main\n"
        "given = ['--bits', 'x=8', '--gate', 'top1>0', '--calib', 'x', '--device', 'cuda']\n"
        "for command in main.commands.values():\n"
        "    assert command.get_help(click.Context(command, info_name=command.name))\n"
        "    shell = BashComplete(main, {}, 'program', 'VARIABLE')\n"
        "    assert shell.get_completions([command.name, 'x', *given], '--')\n"
        "assert main.get_help(click.Context(main))\n"
        f"print(sorted(set({HEAVY}) & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_the_http_side_of_a_server_needs_no_torch() -> None:
    """Its process would take 250 MB more, and three seconds to begin."""
    names = ("app", "server", "served_model", "supervisor", "link.process", "link.client")
    code = "".join(f"import lowbit.runtime.serve.{name}\n" for name in names)
    code += "import sys\nprint(sorted({'torch', 'triton', 'numpy'} & sys.modules.keys()))\n"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "tests", capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


def test_docstrings_begin_with_the_thing() -> None:
    riddle = re.compile(r'^\s*r?"""(What|Whether|How|Of|That)\b', re.MULTILINE)
    for path in sources("convert", "formats", "runtime", "examples"):
        assert not riddle.search(path.read_text(encoding="utf-8")), f"{path}"


def test_files_stay_short() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for path in sources(*ROOMS, "tests", "examples")
        if (lines := len(path.read_text().splitlines())) > MAX_LINES
    }
    assert not long
