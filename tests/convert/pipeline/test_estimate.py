"""`plan`: the same for a folder and a Hub id, and what the conversion then does."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from lowbit.convert import Override, Recipe, Request
from lowbit.convert.api import plan_conversion
from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import Pair
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline.estimate import blocks_ram, open_headers
from lowbit.convert.plan.compatibility import runtime_verdict, vllm_verdict
from lowbit.convert.plan.memory import BASE_BYTES, block_elements
from lowbit.convert.plan.method import RTN, Method
from lowbit.convert.plan.plan import Plan, make_plan
from lowbit.convert.texts.evaluation import default_texts
from lowbit.formats.errors import LowbitError, ResourceError
from tests.conversions import convert
from tests.convert.edits import edit_json
from tests.convert.fixture_types import MakeModel
from tests.hub_server import HubServer
from tests.lanes import in_commands

SHARDS = ("one.safetensors", "two.safetensors")
LIMIT = 200_000
CPU = torch.device("cpu")
MODELS = Path(__file__).parents[3] / "examples" / "models"


@pytest.fixture
def source(tmp_path: Path, make_model: MakeModel) -> Path:
    folder = make_model(tmp_path / "source", shards=SHARDS)
    (folder / "LICENSE").write_text("x" * 1000)
    (folder / "model.gguf").write_text("not read")
    return folder


def plan_of(source: str, recipe: Recipe | None = None, revision: str | None = None) -> Plan:
    checkpoint, _ = open_headers(source, revision)
    return make_plan(checkpoint.config, checkpoint.tensors, recipe or Recipe(), LIMIT)


def test_what_it_says_is_what_happens(source: Path, tmp_path: Path) -> None:
    recipe = Recipe("int8", 32, overrides=(Override("*.mlp.*", 4), Override("lm_head", 16)))
    plan = plan_of(str(source), recipe)
    done = convert(source, tmp_path / "out", recipe, max_shard_bytes=LIMIT)
    assert plan == done.plan
    sizes = {shard.file: shard.size for shard in plan.shards}
    assert sizes == {path.name: path.stat().st_size for path in done.folder.glob("*.safetensors")}
    others = ("LICENSE", "generation_config.json")
    other_bytes = sum((done.folder / name).stat().st_size for name in others)
    assert open_headers(str(source), None)[1].total == other_bytes
    assert vllm_verdict(plan) == []
    assert runtime_verdict(plan) is None
    assert 240e6 < blocks_ram(plan, CPU) < 350e6


def test_the_peak_is_that_of_the_device(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a GPU are larger, and its workers and libraries take other memory."""
    asked = []

    def elements(limit: None, workers: int, device: torch.device, held: int) -> int:
        asked.append((device.type, held))
        return 1 << 20

    monkeypatch.setattr("lowbit.convert.pipeline.estimate.block_elements", elements)
    monkeypatch.setattr("lowbit.convert.plan.memory.resident_bytes", lambda: 300_000_000)
    monkeypatch.setattr("lowbit.convert.pipeline.estimate.core_count", lambda: 4)
    plan = plan_of(str(source), Recipe(method=Method.parse("gptq+rotate")))
    peaks = [blocks_ram(plan, device) for device in (CPU, torch.device("cuda"))]
    largest = 256 * 128 * 4  # of the matrices whose rows are mixed; a GPU does that itself
    assert [kind for kind, _ in asked] == ["cpu", "cuda"]
    assert asked[1][1] == largest < asked[0][1]
    tensors = {step.source.name: step.source for step in plan.steps}.values()
    weights = [math.prod(tensor.shape) for tensor in tensors]  # fewer than blocks have room for
    assert peaks[0] == BASE_BYTES + 6 * sum(weights) + asked[0][1] + 4 * 36 * max(weights)
    room = (1 << 20) * (4 * 12 + 4 * 8)
    assert peaks[1] == 300_000_000 + (96 << 20) + (500 << 20) + asked[1][1] + room


@pytest.mark.parametrize(
    ("limit", "held", "message", "hint"),
    [
        (1_000_000, 0, "--max-ram 1.00 MB is too", "give at least 0.5GB"),
        (1_000, 30_000, "--max-ram 1.00 kB is too", "give at least 0.5GB"),
        (
            *(450_000_000, 900_000_000, "--max-ram 450.00 MB is too"),
            "give at least 1.4GB; 0.5GB is enough with --method gptq",
        ),
    ],
)
def test_too_little_memory_is_named_with_the_least(
    monkeypatch: pytest.MonkeyPatch, limit: int, held: int, message: str, hint: str
) -> None:
    monkeypatch.setattr("lowbit.convert.plan.memory.resident_bytes", lambda: 300_000_000)
    needs = (300_000_000 + (96 << 20) + held + (1 << 16) * (4 * 12 + 2 * 36)) / 1e6
    size = f"{needs / 1e3:.2f} GB" if needs >= 1000 else f"{needs:.2f} MB"
    with pytest.raises(ResourceError) as caught:
        block_elements(limit, 2, CPU, held)
    assert str(caught.value) == (
        f"{message} little: the process needs {size} before it holds a weight"
    )
    assert caught.value.hint == hint


def test_verdicts(source: Path) -> None:
    plan = plan_of(str(source), Recipe(overrides=(Override("*.o_proj", 5),)))
    where = "`model.layers.0.self_attn.o_proj`"
    assert vllm_verdict(plan) == [f"5-bit weights: {where} and 1 more"]
    assert runtime_verdict(plan) == f"5-bit weights (served: 2, 3, 4, 8): {where}"


def shorten(config: dict[str, Any], context: int) -> None:
    config.get("text_config", config)["max_position_embeddings"] = context


class ToldError(Exception):
    """Ends a report before its work begins."""


def compared_by_a_report(folder: Path) -> str:
    """Tokens that a report names before it compares logits of a model."""
    said = []

    def note(line: str) -> None:
        said.append(line)
        raise ToldError

    weights = open_weights(folder)
    with pytest.raises(ToldError):
        measure_logits(Pair(weights, weights), default_texts(), note=note)
    return said[0].partition(", in at most")[0]


@in_commands("tiny-qwen3-moe-300", "tiny-qwen3.5-1024")
@pytest.mark.parametrize(
    ("name", "context"),
    [
        ("tiny-qwen3", 2048),
        ("tiny-qwen3", 1000),  # has no longer windows
        ("tiny-qwen3-moe", 300),
        ("tiny-qwen3.5", 1024),
        ("tiny-qwen3.5-vision", 2048),
    ],
)
def test_tokens_of_a_report_are_those_that_it_compares(
    tmp_path: Path, name: str, context: int
) -> None:
    folder = Path(shutil.copytree(MODELS / name, tmp_path / name))
    edit_json(folder / "config.json", partial(shorten, context=context))
    checkpoint, files = open_headers(str(folder), None)
    found = plan_conversion(checkpoint, files, Request(Recipe(method=RTN), effort=None)).report
    assert found is not None
    assert found.counted
    again = f", and of {found.long_tokens:,} in longer windows" if found.long_tokens else ""
    assert bool(again) == (context >= 1024)
    told = f"comparing logits of {found.tokens:,} tokens of 3 texts{again}"
    assert compared_by_a_report(folder) == told
    (folder / "tokenizer.json").unlink()
    guessed = plan_conversion(checkpoint, files, Request(Recipe(method=RTN), effort=None)).report
    assert guessed is not None
    assert not guessed.counted
    assert guessed.long_tokens == found.long_tokens


@pytest.mark.parametrize(
    ("unknown", "why"),
    [
        ({}, "WordLevel error: Missing [UNK] token from the vocabulary"),
        ({"<unk>": 1}, "evaluation text `prose` has 1 tokens, expected at least 2"),
    ],
)
def test_a_tokenizer_that_reads_no_text_leaves_the_rest_of_a_plan(
    source: Path, unknown: dict[str, int], why: str
) -> None:
    Tokenizer(WordLevel({"lowbit": 0} | unknown)).save(str(source / "tokenizer.json"))
    checkpoint, files = open_headers(str(source), None)
    request, said = Request(Recipe(method=RTN), effort=None), list[str]()
    assert plan_conversion(checkpoint, files, request, note=said.append).report is None
    assert said[0].startswith("--report compares no logits: ")
    assert said[0].endswith(why)


def test_a_plan_without_a_tokenizer_says_that_a_report_needs_it(source: Path) -> None:
    checkpoint, files = open_headers(str(source), None)
    request, said = Request(Recipe(method=RTN), effort=None), list[str]()
    assert plan_conversion(checkpoint, files, request, note=said.append).report is None
    missing = f"`{source}` has no tokenizer.json, which the logit report needs"
    assert said == [f"--report compares no logits: {missing}"]


def test_hub_id_gives_the_same_plan_from_headers_alone(
    source: Path, hub: HubServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    hub.add("org/model", source)
    assert plan_of("org/model") == plan_of(str(source))
    here, there = (open_headers(name, None)[1] for name in (str(source), "org/model"))
    assert here.sizes == there.sizes
    assert (here.repo, there.repo) == (None, "org/model")
    weights = sum((source / name).stat().st_size for name in SHARDS)
    assert hub.sent() < weights / 2


def test_hub_revision(source: Path, hub: HubServer, make_model: MakeModel) -> None:
    hub.add("org/model", source)
    older = make_model(source.parent / "older", num_hidden_layers=1)
    hub.add("org/model", older, "v1")
    assert plan_of("org/model", revision="v1") == plan_of(str(older))


def test_what_stops_a_conversion_stops_the_plan(source: Path, hub: HubServer) -> None:
    (source / "two.safetensors").unlink()
    with pytest.raises(LowbitError, match=r"names shard `two.safetensors`, which is missing"):
        open_headers(str(source), None)
    hub.add("org/model", Path(shutil.copytree(source, source.parent / "copy")))
    with pytest.raises(LowbitError, match=r"names shard `two.safetensors`, which `org/model` lack"):
        open_headers("org/model", None)
