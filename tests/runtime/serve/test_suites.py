"""Public suites: llm-comply's tests of three formats, and schemathesis over our own document."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llm_comply
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase as Case
from llm_comply.tests import get_tests
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from lowbit.runtime.engine.load import load
from tests.runtime.serve.conftest import BUNDLED, NAME, SEQUENCES, Running, running, tool_model

SPECS = Path(llm_comply.__file__).parent / "specs"
FORMATS = {
    "openai-chat": "openai_chat.json",
    "anthropic": "anthropic.json",
    "open-responses": "openresponses.json",
}
IMAGES = "image-input"  # items for a model with a vision tower
MOST = {"/v1/responses": "max_output_tokens"}  # else `max_tokens`

pytestmark = [
    pytest.mark.commands,
    pytest.mark.filterwarnings("ignore:jsonschema.RefResolver"),
]


def short(name: str, case: Case) -> Case:
    """The same test, whose answer a small model can end: it writes what comes, without end."""

    def build(config: ComplianceConfig) -> dict[str, Any]:
        body: dict[str, Any] = case.build_request(config) | {"temperature": 0}
        for tool in body.get("tools", ()):
            schema = tool.get("function", tool)
            schema = schema.get("parameters") or schema["input_schema"]
            schema["properties"]["location"]["maxLength"] = 8
            schema["additionalProperties"] = False
            if name == "anthropic":
                body["tool_choice"]["disable_parallel_tool_use"] = True
            else:
                body["parallel_tool_calls"] = False
        return body

    return replace(case, build_request=build)


def cases(images: bool) -> list[Any]:
    return [
        pytest.param(name, case, id=f"{name}-{case.id}")
        for name in FORMATS
        for case in get_tests(name)
        if (IMAGES in case.id) == images
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """The whole bundled model, which ends its answers sooner."""
    folder = tool_model(BUNDLED, tmp_path_factory.mktemp("suites") / "tiny-qwen3")
    with running(load(folder, device="cpu", max_sequences=SEQUENCES, context=1024)) as found:
        yield found


@pytest.fixture(scope="module")
def describing(seeing_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A model that sees, and ends its answers soon: three of four tokens do."""
    folder = tmp_path_factory.mktemp("suites") / "seeing"
    shutil.copytree(seeing_folder, folder)
    ends = [id for id in range(256) if id % 4]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    with running(load(folder, device="cpu", max_sequences=2, context=1024)) as found:
        yield found


@pytest.mark.parametrize(("name", "case"), cases(images=False))
def test_llm_comply(whole: Running, name: str, case: Case) -> None:
    complies(whole, name, case)


@pytest.mark.parametrize(("name", "case"), cases(images=True))
def test_llm_comply_with_images(describing: Running, name: str, case: Case) -> None:
    complies(describing, name, case)


def test_every_format_has_an_item_with_an_image() -> None:
    assert sorted(case.values[0] for case in cases(images=True)) == sorted(FORMATS)


def complies(server: Running, name: str, case: Case) -> None:
    config = ComplianceConfig(base_url=f"{server.url}/v1", api_key="none", model=NAME)
    runner = Runner(config, [], SpecLoader(str(SPECS / FORMATS[name])))
    found = runner.run_one(short(name, case))
    if found.status.value == "skipped":
        pytest.skip(found.errors[0])
    assert found.errors == []


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_schemathesis_finds_no_server_error(server: Running, mode: GenerationMode) -> None:
    """A few requests for every operation; examples/maintenance/fuzz_serve.py sends thousands."""
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    for result in document.get_all_operations():
        assert isinstance(result, Ok)
        operation = result.ok()
        if operation.method != "post" or "Body" not in str(operation.definition.raw):
            continue

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=2,
            database=None,
            derandomize=True,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def check(case: Any) -> None:
            if mode is GenerationMode.POSITIVE and case.path.startswith("/v1/"):
                case.body |= {MOST.get(case.path, "max_tokens"): 2, "model": NAME}
            case.call_and_validate(checks=[not_a_server_error])

        check()
