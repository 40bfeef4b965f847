"""`lowbit-run doctor`: what it finds on machines of all kinds, and the speeds it expects."""

import importlib
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from lowbit.convert import Recipe
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime.cli.main import main
from lowbit.runtime.kernels.launch.linear import GemvLaunch
from lowbit.runtime.kernels.launch.tuned import (
    Launches,
    MeasuredCard,
    keep_launches,
    kernels_version,
)
from lowbit.runtime.lab import checks, expected
from lowbit.runtime.lab.checks import Finding, look
from lowbit.runtime.lab.expected import PROMPT, PROMPT_SHARE, demand_of, usual
from lowbit.runtime.lab.expected import expected as expect
from lowbit.runtime.lab.machine_speed import seconds_beside_read
from lowbit.runtime.models.loader import open_model, with_drafter
from tests.conversions import convert
from tests.drafters import write_drafter
from tests.hub_server import HubServer
from tests.load_script import load_script
from tests.runtime.conftest import PackedModel

EXAMPLES = Path(__file__).parents[3] / "examples"
TINY = EXAMPLES / "models" / "tiny-qwen3"
H200 = 4.45e12  # bytes per second, between the 4.3 and 4.6 of BENCHMARKS.md
Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(expected, "read_bandwidth", lambda device: 20e9)
    monkeypatch.setattr(expected, "products_per_s", lambda: 50e9)
    monkeypatch.setattr(expected, "seconds_beside_read", lambda device, mixture: 1e-3)
    return lambda *arguments: CliRunner().invoke(main, ("doctor", *arguments))


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    found = {each.what: each for each in findings}
    assert len(found) == len(findings)
    return found


def see_card(patch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """A machine with one GPU."""
    card = SimpleNamespace(name="NVIDIA X", total_memory=24e9, major=major, minor=minor)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: card)


def test_a_machine_without_a_gpu_is_whole(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(checks, "DRIVER", Path("/nowhere/version"))
    done = run("--json")
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    found = {each["what"]: each for each in content["findings"]}
    assert content["ok"] is True
    assert found["GPU"]["state"] == "note"
    assert "C compiler" not in found, "a CPU needs none"
    assert version("lowbit") in found["lowbit"]["found"]
    speed = content["speed"]
    assert (speed["device"], speed["bandwidth"]) == ("cpu", 20e9)
    assert len(speed["models"]) == len(usual())
    for model in speed["models"]:
        assert model["most_tokens_per_s"] == pytest.approx(20e9 / model["token_bytes"])
        [demand] = [each for each in usual() if each.name == model["name"]]
        step_s = demand.token_bytes / 20e9 / 0.4 + demand.layers * 1e-3
        assert model["tokens_per_s"] == pytest.approx(1 / step_s)
        assert model["share"] == pytest.approx(demand.token_bytes / 20e9 / step_s)
        prompt_s = PROMPT * demand.token_weights / 50e9 / PROMPT_SHARE + demand.layers * 1e-3
        assert model["prompt_tokens_per_s"] == pytest.approx(PROMPT / prompt_s)


def test_the_table_goes_to_stdout(run: Run) -> None:
    done = run("--device", "cpu")
    assert (done.exit_code, done.stderr) == (0, "")
    for words in (
        "PyTorch",
        "which reads 20.00 GB/s",
        "Qwen3-8B",
        "lowbit-run bench MODEL",
    ):
        assert words in done.stdout
    for column in ("per token", "at most", "expected", "share", "prompt", "memory"):
        assert f"\n{column}: " in done.stdout
    assert "GPU  " not in done.stdout, "it was not asked about"


def test_a_gpu_that_was_asked_for_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = run("--device", "cuda", "--json")
    content = json.loads(done.stdout)
    assert (done.exit_code, content["ok"], content["speed"]) == (1, False, None)
    [gpu] = [each for each in content["findings"] if each["what"] == "GPU"]
    assert gpu["state"] == "missing"


def test_a_driver_that_torch_cannot_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 2024\n"
    (tmp_path / "version").write_text(line)
    monkeypatch.setattr(checks, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")

    def unusable() -> bool:
        warnings.warn("The NVIDIA driver on your system is too old\nUpdate it.", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", unusable)
    found = by_name(look(None, ask_hub=False))
    assert found["GPU"].state == "missing"
    assert found["GPU"].found.endswith("The NVIDIA driver on your system is too old")
    assert found["NVIDIA driver"].found == "470.256.02"
    monkeypatch.setattr(torch.version, "cuda", None)
    found = by_name(look(None, ask_hub=False))
    assert "built for CPUs" in found["GPU"].found
    assert "pytorch.org" in found["GPU"].hint


@pytest.mark.parametrize(
    ("capability", "state"),
    [((7, 5), "missing"), ((8, 0), "ok"), ((8, 7), "note"), ((9, 0), "ok"), ((12, 1), "note")],
)
def test_kernels_for_a_card(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], state: str
) -> None:
    see_card(monkeypatch, *capability)
    found = by_name(look(None, ask_hub=False))
    assert found["GPU"].state == state
    major, minor = capability
    assert f"24 GB, compute capability {major}.{minor}" in found["GPU"].found
    assert {"Triton", "C compiler", "Python headers", "kernel cache"} <= found.keys()


def launches_of(patch: pytest.MonkeyPatch, major: int, minor: int) -> Finding:
    see_card(patch, major, minor)
    return by_name(look(None, ask_hub=False))["launches"]


def test_launches_that_models_load_with(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    bundled = launches_of(monkeypatch, 9, 0)
    assert (bundled.state, bundled.hint) == ("ok", "")
    assert "of the bundled tables, measured on an H200" in bundled.found
    other = launches_of(monkeypatch, 8, 9)
    assert (other.state, other.hint) == ("note", "lowbit-run tune MODEL measures on this GPU")
    card = MeasuredCard("NVIDIA X", 90, kernels_version())
    one = {(4, 64, 8, False): ((1, GemvLaunch(1, 2, 4)),)}
    older = keep_launches(Launches(replace(card, kernels="0" * 12), "2026-01-01", one))
    stale = launches_of(monkeypatch, 9, 0)
    assert stale.state == "note"
    assert f"`{older}` is of other kernels" in stale.found
    path = keep_launches(Launches(card, "2026-11-26", one))
    tuned = launches_of(monkeypatch, 9, 0)
    assert tuned.state == "ok"
    assert tuned.found == f"measured here on 2026-11-26 for 1 linears: {path}"
    path.write_text("{}")
    damaged = launches_of(monkeypatch, 9, 0)
    assert damaged.state == "missing"
    assert "lacks `schema`" in damaged.found
    assert "remove the file" in damaged.hint


def test_what_triton_needs_to_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    see_card(monkeypatch, 9, 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_paths", lambda scheme: {"include": str(tmp_path)})
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "below"))
    found = by_name(look(None, ask_hub=False))
    for name in ("C compiler", "Python headers", "kernel cache"):
        assert found[name].state == "missing", name
        assert found[name].hint, name
    monkeypatch.setenv("CC", "no-such-compiler")
    assert "`no-such-compiler`" in by_name(look(None, ask_hub=False))["C compiler"].found
    (tmp_path / "Python.h").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "new" / "below"))
    found = by_name(look(None, ask_hub=False))
    assert found["Python headers"].state == found["kernel cache"].state == "ok"
    assert not (tmp_path / "new").exists(), "nothing is written"


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    see_card(monkeypatch, 9, 0)
    absent(monkeypatch, "triton")
    assert by_name(look(None, ask_hub=False))["Triton"].state == "missing"
    assert by_name(look("cpu", ask_hub=False)).keys().isdisjoint({"Triton", "kernel cache"})


def test_without_torch(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    absent(monkeypatch, "torch")
    done = run()
    assert done.exit_code == 1
    assert "libcudart.so.13" in done.stdout
    assert "Qwen3-8B" not in done.stdout


def absent(patch: pytest.MonkeyPatch, package: str) -> None:
    """A package that cannot be imported."""
    importing = importlib.import_module

    def refuse(name: str, *more: Any) -> ModuleType:
        if name.split(".")[0] == package:
            raise OSError("libcudart.so.13: cannot open shared object file")
        return importing(name, *more)

    patch.setattr("importlib.import_module", refuse)


def test_a_server_without_its_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(name: str) -> str:
        if name in ("fastapi", "llguidance"):
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(checks, "version", asked)
    found = by_name(look("cpu", ask_hub=False))["server"]
    assert (found.state, found.found) == ("note", "not installed: fastapi, llguidance")


def test_the_hub_is_asked_only_if_told(
    run: Run, hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--device", "cpu", "--json")
    assert hub.requests() == []
    done = run("--device", "cpu", "--json", "--hub")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["findings"][-1]["found"] == f"{hub.endpoint} answers"
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    done = run("--device", "cpu", "--json", "--hub")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["findings"][-1]["state"] == "missing"


@pytest.mark.parametrize(
    ("name", "tokens_per_s"),  # INT4, one H200
    [
        ("Qwen3-0.6B", 3465),
        ("Qwen3-1.7B", 2280),
        ("Qwen3-4B", 1231),
        ("Qwen3-8B", 835),
        ("Qwen3.5-0.8B", 3308),
        ("Qwen3.5-2B", 2087),
        ("Qwen3.5-4B", 1136),
        ("Qwen3.5-9B", 738),
        ("Qwen3-14B", 478),
        ("Qwen3.5-27B", 246),
        ("Qwen3-30B-A3B", 1084),
        ("Qwen3.5-35B-A3B", 1074),
    ],
)
def test_expects_what_was_measured(name: str, tokens_per_s: float) -> None:
    [demand] = [each for each in usual() if each.name == name]
    layer_s = seconds_beside_read("cuda", demand.experts)
    found = expect(demand, "cuda", H200, layer_s, None, None)
    assert found.prompt_tokens_per_s is None
    assert found.tokens_per_s == pytest.approx(tokens_per_s, rel=0.12)
    assert found.share == pytest.approx(found.tokens_per_s / found.most_tokens_per_s)
    assert f"{tokens_per_s:,}" in (EXAMPLES.parent / "BENCHMARKS.md").read_text()


@pytest.fixture
def hybrid_without_tower(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    shutil.copytree(HYBRID, folder)
    weights = load_file(HYBRID / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "visual" not in name}
    save_file(kept, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", [each.name for each in usual() if not each.experts])
def test_usual_sizes_are_those_of_their_configs(tmp_path: Path, name: str) -> None:
    size = name.replace("Qwen3-", "").replace("Qwen3.5", "3.5")
    config = load_script("make_random_checkpoint").config_of(size)
    (tmp_path / "config.json").write_text(json.dumps(config))
    [demand] = [each for each in usual() if each.name == name]
    assert replace(demand_of(str(tmp_path), "cuda"), name=name) == demand


def test_headers_and_config_say_the_same() -> None:
    folder, config = demand_of(str(TINY), "cuda"), demand_of(str(TINY / "config.json"), "cuda")
    assert (
        folder.weights
        == config.weights
        == open_model(TINY, "int4").weight_bytes("cuda", torch.bfloat16)
    )
    assert folder.token_bytes == config.token_bytes
    assert folder.recipe == "int4"


def test_a_packed_folder_counts_its_own_codes(make_model: Callable[..., PackedModel]) -> None:
    four, eight = (make_model(lambda _, bits=bits: Scheme(bits, 32)).folder for bits in (4, 8))
    found = [demand_of(str(folder), "cuda") for folder in (four, eight)]
    assert [each.recipe for each in found] == [None, None]
    weights = 2 * 64 * (128 + 2 * 64 + 128 + 3 * 96) + 272 * 64  # two layers, and the head
    assert found[1].weights - found[0].weights == weights // 2


def test_a_model_on_the_hub_is_read_by_its_headers(hub: HubServer) -> None:
    hub.add("org/tiny", TINY)
    found, local = demand_of("org/tiny", "cuda"), demand_of(str(TINY), "cuda")
    assert (found.weights, found.token_bytes) == (local.weights, local.token_bytes)
    assert all(request.sent < 200_000 for request in hub.requests())


def test_the_vision_tower_counts_apart(run: Run, hybrid_without_tower: Path) -> None:
    tower = [w for name, w in load_file(HYBRID / "model.safetensors").items() if "visual" in name]
    bytes_of = 2 * sum(weight.numel() for weight in tower)
    plain = demand_of(str(hybrid_without_tower), "cuda")
    assert replace(demand_of(str(HYBRID), "cuda"), name=plain.name) == replace(
        plain, vision=bytes_of
    )
    assert plain.vision == 0
    done = run(str(HYBRID), "--device", "cpu")
    assert "images: " in done.stdout
    assert "--vision-device cpu" not in done.stdout
    [model] = json.loads(run(str(HYBRID), "--device", "cpu", "--json").stdout)["speed"]["models"]
    assert model["vision_bytes"] == bytes_of
    assert "images: " not in run(str(TINY), "--device", "cpu").stdout


def test_too_much_memory_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expected, "free_bytes", lambda device: 1_000_000)
    assert "GB !" in run(str(TINY), "--device", "cpu").stdout
    assert "! more memory than is free" in run(str(TINY), "--device", "cpu").stdout
    monkeypatch.setattr(expected, "free_bytes", lambda device: None)
    assert "more memory than is free" not in run(str(TINY), "--device", "cpu").stdout


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "neither a folder"),
        ("{", "config.json"),
        ("[]", "config.json"),
        ('{"model_type": "gpt2"}', "not supported"),
        ('{"model_type": "qwen3"}', "config.json"),
        ('{"model_type": "qwen3", "quantization_config": {"quant_method": "gptq"}}', "quantized"),
    ],
)
def test_no_model(run: Run, tmp_path: Path, content: str | None, word: str) -> None:
    folder = tmp_path / "model"
    if content is not None:
        folder.mkdir()
        (folder / "config.json").write_text(content)
    done = run(str(folder), "--device", "cpu")
    assert done.exit_code == 1
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_a_drafter_is_no_model(run: Run) -> None:
    drafter = EXAMPLES / "models" / "tiny-qwen3.5-dflash"
    for name in (drafter, drafter / "config.json"):
        done = run(str(name), "--device", "cpu")
        assert (done.exit_code, "is a drafter" in done.stderr) == (1, True), done.output


HYBRID, DRAFTER = (EXAMPLES / "models" / name for name in ("tiny-qwen3.5", "tiny-qwen3.5-dflash"))


def test_a_drafter_counts_beside_its_model() -> None:
    """By headers and by config.json alone; its memory is that of a model loaded with it."""
    plain = demand_of(str(HYBRID), "cuda")
    for model, drafter in (
        (HYBRID, DRAFTER),
        (HYBRID / "config.json", DRAFTER / "config.json"),
        (HYBRID, DRAFTER / "config.json"),
    ):
        found = demand_of(str(model), "cuda", str(drafter))
        own = found.drafter
        assert own is not None
        opened = with_drafter(open_model(HYBRID, "int4"), DRAFTER)
        assert found.weights == opened.weight_bytes("cuda", torch.bfloat16)
        assert own.weights == found.weights - plain.weights
        assert own.cache_token_bytes == 2 * 2 * 2 * 64 * 2  # K and V, layers, heads, numbers, BF16
        tokens = 4096
        pages = 2 + tokens // 64
        assert found.sequence_bytes - plain.sequence_bytes == pages * 64 * own.cache_token_bytes
        assert found.token_bytes == plain.token_bytes
        assert (own.layers, own.reads) == (2, (0, 1, 2))


def test_a_drafter_on_the_hub_is_read_by_its_headers(hub: HubServer) -> None:
    hub.add("org/dflash", DRAFTER)
    found = demand_of(str(HYBRID), "cuda", "org/dflash")
    local = demand_of(str(HYBRID), "cuda", str(DRAFTER))
    assert found.drafter is not None
    assert local.drafter == replace(found.drafter, name=str(DRAFTER))
    assert all(request.sent < 200_000 for request in hub.requests())


def test_a_draft_head_is_counted_with_the_drafter(tmp_path: Path) -> None:
    convert(HYBRID, tmp_path, Recipe(draft_vocabulary=512))
    own = demand_of(str(tmp_path), "cuda", str(DRAFTER)).drafter
    without = demand_of(str(HYBRID), "cuda", str(DRAFTER)).drafter
    assert own is not None
    assert without is not None
    assert own.weights - without.weights == 512 * (256 // 2 + 2 * 256 // 128)


def test_the_drafter_is_shown(run: Run) -> None:
    done = run(str(HYBRID), "--drafter", str(DRAFTER), "--device", "cpu")
    assert done.exit_code == 0, done.output
    shown = " ".join(done.stdout.split())
    for words in ("suits the model", "blocks of 8 tokens", "outputs of layers 0, 1, 2", "a token"):
        assert words in shown
    found = json.loads(
        run(str(HYBRID), "--drafter", str(DRAFTER), "--device", "cpu", "--json").stdout
    )
    [model] = found["speed"]["models"]
    assert model["drafter"]["name"] == str(DRAFTER)
    assert (
        json.loads(run(str(HYBRID), "--device", "cpu", "--json").stdout)["speed"]["models"][0][
            "drafter"
        ]
        is None
    )


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vocab_size": 4097}, "vocabulary of 4097"),
        ({"num_target_layers": 5}, "a model of 5 layers"),
        ({"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}}, "reads layer 3"),
        ({"architectures": ["XPressDraftModel"]}, "`XPressDraftModel` is not supported"),
    ],
)
def test_a_drafter_for_another_model(
    run: Run, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    write_drafter(tmp_path, **changes)
    for place in (tmp_path, tmp_path / "config.json"):
        done = run(str(HYBRID), "--drafter", str(place), "--device", "cpu")
        assert (done.exit_code, word in done.stderr) == (1, True), done.output


def test_what_is_no_drafter(run: Run, tmp_path: Path) -> None:
    done = run(str(HYBRID), "--drafter", str(HYBRID), "--device", "cpu")
    assert (done.exit_code, "is no drafter" in done.stderr) == (1, True)
    done = run(str(HYBRID), "--drafter", str(tmp_path / "nowhere"), "--device", "cpu")
    assert (done.exit_code, "neither a folder" in done.stderr) == (1, True)
    done = run("--drafter", str(DRAFTER), "--device", "cpu")
    assert (done.exit_code, "--drafter needs MODEL" in done.stderr) == (2, True)
