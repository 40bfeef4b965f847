"""What the pages of docs/ say stands in the code: links, messages, limits, routes and names."""

import ast
import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest

import lowbit.convert
import lowbit.runtime
from lowbit.convert.measure.gate import HEADLINE, OF_LONG_TEXTS, SIZE
from lowbit.convert.report.limits import EXPECTED, LIMITS, TAIL, TITLES
from lowbit.formats.architectures import read_config
from lowbit.formats.files.strict_json import loads
from lowbit.formats.sampling_ranges import MOST_BIASES
from lowbit.runtime.engine.load_options import MODES
from lowbit.runtime.engine.stats import Load
from lowbit.runtime.images.data_url import MOST_BYTES
from lowbit.runtime.images.decode import MOST_ASPECT, MOST_PIXELS
from lowbit.runtime.images.picture import MOST_IMAGES, MOST_NEW_IMAGES, MOST_PROMPT_PIXELS
from lowbit.runtime.lab.expected import usual
from lowbit.runtime.serve import app, settings
from lowbit.runtime.serve.auth import OPEN_FOLDER, OPEN_PATHS
from lowbit.runtime.serve.link.messages import LoadFound
from lowbit.runtime.serve.metrics import Collector, Metrics, new_registry
from lowbit.runtime.text.grammar_source import MOST_CHOICE

ROOT = Path(__file__).parents[1]
ROOMS = [ROOT / name for name in ("formats", "convert", "runtime")]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md"))]
BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!`)!?\[[^]`]*\]\(([^)\s]+)\)")
FIGURE = re.compile(r"(?<![\w.])(?:\d[\d,]*)?[.,]\d[\d,]*|\d{3,}")
SPAN = re.compile(r"(`+)(.+?)\1(?!`)")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def rows_of(page: str, first: str) -> list[list[str]]:
    """Cells of the table of a page whose header begins with a word."""
    lines = iter(text_of(ROOT / "docs" / page).splitlines())
    for line in lines:
        if line.startswith(f"| {first}"):
            break
    next(lines)
    rows = []
    for line in lines:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def anchors_of(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", BLOCK.sub("", text_of(page)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(BLOCK.sub("", text_of(page))):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        assert found.exists(), target
        assert not anchor or anchor in anchors_of(found), target


def test_every_page_is_in_the_menu_and_in_the_overview() -> None:
    site = yaml.safe_load(text_of(ROOT / "mkdocs.yml"))
    assert all((ROOT / "docs" / name).exists() for name in site["extra_css"])
    named = {page for section in site["nav"] for pages in section.values() for page in pages}
    assert {page.name for page in DOCS} <= named
    overview = set(LINK.findall(text_of(ROOT / "docs" / "index.md")))
    assert {page.name for page in DOCS} - {"index.md"} <= overview


@pytest.mark.parametrize(
    "page", ["README.md", "docs/long-contexts.md", "docs/speculation.md", "docs/kernels.md"]
)
def test_figures_of_tables_are_measured_ones(page: str) -> None:
    measured = set(FIGURE.findall(text_of(ROOT / "BENCHMARKS.md")))
    lines = BLOCK.sub("", text_of(ROOT / page)).splitlines()
    cells = [cell for line in lines if line.startswith("|") for cell in line.split("|")[2:]]
    found = {figure for cell in cells for figure in FIGURE.findall(cell)}
    assert found <= measured


JOINT = re.compile(r"""["']\s*\n\s*f?["']""")  # between the parts of a text over several lines
FILLED = re.compile(r"\{(?:[^{}]|\{[^{}]*\})+\}")


@cache
def templates() -> str:
    """The code, its texts joined; … stands for what is filled in."""
    code = (text_of(path) for room in ROOMS for path in room.rglob("*.py"))
    return FILLED.sub("…", JOINT.sub("", "\n".join(code)))


def messages() -> list[str]:
    """Messages in the first columns of the tables of troubleshooting."""
    lines = text_of(ROOT / "docs" / "troubleshooting.md").splitlines()
    cells = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    return [found[1].strip() for cell in cells for found in SPAN.findall(cell)]


@pytest.mark.parametrize("message", messages())
def test_messages_exist(message: str) -> None:
    assert message in templates()


def test_there_are_messages() -> None:
    assert len(messages()) > 40


def test_grades_have_the_limits_of_a_verdict() -> None:
    expected = [
        [TITLES[limit.grade], f"{limit.kl:g}", f"{limit.kl * TAIL:g}", f"{limit.flips * 100:.0f} %"]
        for limit in LIMITS
    ]
    assert rows_of("report.md", "Grade") == [*expected, ["Broken", "more", "more", "more"]]


def test_losses_to_expect() -> None:
    sizes = {"B": 1e9, "M": 1e6}
    shown = [
        (int(bits), float(size.split()[0]) * sizes[size.split()[1]], float(kl))
        for bits, size, kl in rows_of("report.md", "Bits")
    ]
    assert shown == [(bits, row.parameters, row.kl) for bits in EXPECTED for row in EXPECTED[bits]]


def test_figures_of_gates() -> None:
    named = set(re.findall(r"`([a-z_0-9]+)`", text_of(ROOT / "docs" / "report.md")))
    assert {*HEADLINE, *OF_LONG_TEXTS, SIZE} <= named


def test_memory_of_the_usual_sizes() -> None:
    recorded = {row[0]: row[1:] for row in rows_of("../BENCHMARKS.md", "| BF16 original")}
    caches = {each.name: f"{each.sequence_bytes / 1e9:.1f} GB" for each in usual()}
    assert {name: row[2] for name, row in recorded.items()} == caches
    for name, *figures, _ in rows_of("choosing.md", "GB |"):
        assert [f"{figure} GB" for figure in figures] == recorded[name]


def test_routes_are_those_of_the_server() -> None:
    shown = set()
    for row in rows_of("serving-requests.md", "Path"):
        shown |= set(re.findall(r"`([A-Z]+ [^`]+)`", row[0]))
    served = {
        f"{method} {route.path}"
        for api in app.APIS
        for route in api.router.routes
        for method in getattr(route, "methods", set()) - {"HEAD"}
    }
    served = {name.replace("{name:path}", "NAME") for name in served}
    assert shown == served - {"GET /page/{name}"} | {"GET /openapi.json"}


def test_limits_are_those_of_the_server() -> None:
    rows = rows_of("serving-requests.md", "Limit")
    shown = {name: re.findall(r"\d[\d,]*", limit) for name, limit in rows}
    limits = {
        "`n`": [settings.MOST_CHOICES],
        "`prompt` of completions": [settings.MOST_PROMPTS],
        "`messages`, `input`": [settings.MOST_MESSAGES],
        "`tools`": [settings.MOST_TOOLS],
        "`stop`": [settings.MOST_STOPS, settings.MOST_STOP_CHARACTERS],
        "`logit_bias`": [MOST_BIASES],
        "`guided_choice`": [settings.MOST_CHOICE_TEXTS, MOST_CHOICE],
        "`guided_regex`, `guided_grammar`": [settings.MOST_GRAMMAR_CHARACTERS],
        "images": [MOST_NEW_IMAGES, MOST_IMAGES, MOST_PROMPT_PIXELS],
        "an image": [MOST_BYTES, MOST_PIXELS, MOST_ASPECT],
        "the whole body": [settings.MOST_BODY_BYTES, settings.MOST_IMAGE_BODY_BYTES],
    }
    assert shown == {name: [f"{most:,}" for most in bounds] for name, bounds in limits.items()}


def test_paths_without_a_key_are_those_of_the_server() -> None:
    [line] = re.findall(r"KEY`\. (.*) need none", text_of(ROOT / "docs" / "serving.md"))
    assert set(re.findall(r"`(.+?)`", line)) == OPEN_PATHS | {OPEN_FOLDER}


def test_metrics_are_those_of_the_server() -> None:
    found = LoadFound(Load(1, 0, 1, 0, 2, 0, 0, 0), 0, 0)
    registry = new_registry(Collector(Metrics(), found, "m", "exact", positions=2))
    given = set(re.findall(r"^# TYPE (\S+)", generate_latest(registry).decode(), re.MULTILINE))
    rows = rows_of("serving-operation.md", "Metric")
    shown = {name for row in rows for name in re.findall(r"`(\S+)`", row[0])}
    assert shown | {"vllm:spec_decode_num_accepted_tokens_per_pos_total"} == given


def test_modes_of_speculation() -> None:
    shown = {row[0].strip("`") for row in rows_of("speculation.md", "`--speculate`")}
    assert shown == set(MODES) - {"off"}


def test_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: lowbit\.(\S+)$", text_of(ROOT / "docs" / "reference.md"), re.M)
    for package in (lowbit.runtime, lowbit.convert):
        room = package.__name__.removeprefix("lowbit.")
        homes = {f"{room}.{home}.{name}" for name, home in package._HOMES.items()}
        assert homes <= set(shown)
    for name in shown:
        module, _, attribute = name.rpartition(".")
        tree = ast.parse(text_of(ROOT / f"{module.replace('.', '/')}.py"))
        assert attribute in {getattr(node, "name", None) for node in tree.body}, name


def test_block_of_yarn_is_read() -> None:
    [block] = re.findall(r"```json\n(.*?)```", text_of(ROOT / "docs/long-contexts.md"), re.S)
    bundled = ROOT / "examples" / "models" / "tiny-qwen3" / "config.json"
    config = loads(bundled.read_bytes()) | {"max_position_embeddings": 40960}
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 1e6} | loads(f"{{{block}}}".encode())
    assert read_config(config).max_position_embeddings == 131072


def test_installations_have_the_versions_of_the_constraints() -> None:
    """Wherever a text tells how to install lowbit from its clone."""
    texts = [path.read_text(encoding="utf-8") for room in ROOMS for path in room.rglob("*.py")]
    texts += [text_of(page) for page in PAGES]
    told = [
        found for text in texts for found in re.findall(r"pip install [^`\n]*?'?\.(?:\[| )", text)
    ]
    assert len(told) > 4
    assert [each for each in told if "-c constraints.txt" not in each] == []


def test_the_site_can_be_installed() -> None:
    groups = tomllib.loads(text_of(ROOT / "pyproject.toml"))["dependency-groups"]
    pinned = {line.split("==")[0].lower() for line in text_of(ROOT / "constraints.txt").split()}
    names = {re.split(r"[>=\[<]", entry)[0] for entry in groups["docs"]}
    assert "mkdocs-material" in names
    assert names <= pinned
