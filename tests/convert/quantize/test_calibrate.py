"""Calibrated conversions from start to finish, on the bundled models."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from lowbit.convert.export.export import export
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.weights import measure_weights
from lowbit.convert.original.layer import stages
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.walk import load_layer
from lowbit.convert.original.weights import open_weights
from lowbit.convert.pipeline.conversion import Conversion
from lowbit.convert.pipeline.output_dir import partial_of
from lowbit.convert.plan.method import Method
from lowbit.convert.plan.recipe import Override, Recipe
from lowbit.convert.quantize import choose, learned, windows
from lowbit.convert.quantize.session import CalibrationRequest
from lowbit.convert.quantize.store import PREFIX
from lowbit.formats.errors import QuantizationError, RequestError, ResourceError
from lowbit.formats.layout.manifest import read_manifest
from lowbit.formats.layout.scheme import Scheme
from tests.conversions import convert
from tests.convert.fixture_types import Cli, Hashes

LENGTH, SAMPLES = 32, 16


class _StopError(Exception):
    """A crash."""


@pytest.fixture(scope="module", autouse=True)
def _few_steps() -> Iterator[None]:
    """Training long enough to help, short enough to wait for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned, "AUTOROUND_STEPS", 8)
        patch.setattr(windows, "STEP_TOKENS", 4 * LENGTH)
        yield


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stories, some of which the bundled models were trained on the like of."""
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    stories = Path(__file__).parents[3] / "examples" / "data" / "stories-eval.txt"
    path.write_text(stories.read_text()[:20_000])
    return path


Make = Callable[..., Conversion]


@pytest.fixture
def calibrated(tmp_path: Path, text: Path) -> Make:
    def make(source: Path, method: str, name: str = "out", **fields: object) -> Conversion:
        recipe = Recipe(method=Method.parse(method), **fields)  # type: ignore[arg-type]
        request = CalibrationRequest(text, SAMPLES, LENGTH)
        return convert(source, tmp_path / name, recipe, calibration=request, overwrite=True)

    return make


@pytest.fixture(scope="module")
def of_all_steps(
    _few_steps: None,
    readable: Path,
    text: Path,
    hashes: Hashes,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """Hashes of a conversion by `gptq+rotate+autoround`, which was never interrupted."""
    recipe = Recipe(method=Method.parse("gptq+rotate+autoround"))
    request = CalibrationRequest(text, SAMPLES, LENGTH)
    out = tmp_path_factory.mktemp("whole") / "out"
    return hashes(convert(readable, out, recipe, calibration=request).folder)


def test_a_layer_that_became_worse_takes_nearest_codes(
    readable: Path, tmp_path: Path, calibrated: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of its last linear alone, where that is enough."""
    made = choose._sequential

    def ruined(*given: Any) -> Any:
        linears, tokens = made(*given)
        for name, linear in linears.items():
            if name.endswith("down_proj"):
                linears[name] = replace(linear, scale=-4 * linear.scale)
        return linears, tokens

    monkeypatch.setattr(choose, "_sequential", ruined)
    found = load_file(calibrated(readable, "gptq").folder / "model.safetensors")
    nearest = load_file(
        convert(readable, tmp_path / "nearest", Recipe()).folder / "model.safetensors"
    )
    for name, tensor in nearest.items():
        if name.endswith("_proj.weight_packed"):
            assert torch.equal(found[name], tensor) == (".down_proj." in name), name


def test_another_command_leaves_finished_layers_alone(
    readable: Path, tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "out"
    weighted = Recipe(method=Method("weighted"))
    request = CalibrationRequest(text, 2, LENGTH)

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "calibrate" and list(partial_of(out).glob(f"{PREFIX}*")):
            raise _StopError

    with pytest.raises(_StopError):
        convert(readable, out, weighted, calibration=request, progress=stop)
    layers = {path.name: path.read_bytes() for path in partial_of(out).glob(f"{PREFIX}*")}
    assert layers
    packed = convert(readable, tmp_path / "packed", Recipe(head="bf16")).folder
    others: list[tuple[Callable[[], object], bool]] = [
        (lambda: convert(readable, out, Recipe()), True),
        (
            lambda: convert(
                readable, out, weighted, calibration=CalibrationRequest(text, 3, LENGTH)
            ),
            True,
        ),
        (lambda: export(packed, out, "mlx"), False),
    ]
    for command, may_overwrite in others:
        with pytest.raises(ResourceError, match="holds an interrupted conversion") as caught:
            command()
        assert caught.value.hint is not None
        assert ("--overwrite" in caught.value.hint) == may_overwrite
        assert layers.items() <= {p.name: p.read_bytes() for p in partial_of(out).iterdir()}.items()
    done = convert(readable, out, Recipe(), overwrite=True)
    assert not list(done.folder.glob(f"{PREFIX}*"))


@pytest.mark.commands
@pytest.mark.parametrize(
    ("model", "method"),
    [
        ("short", "weighted"),
        ("short", "gptq"),
        ("short_hybrid", "gptq+autoround"),
    ],
)
def test_layers_get_closer_to_the_original(
    calibrated: Make, request: pytest.FixtureRequest, model: str, method: str
) -> None:
    source: Path = request.getfixturevalue(model)
    done = calibrated(source, method, head="bf16", group_size=32)
    assert [row.layer for row in done.calibration] == [0, 1]
    if method == "weighted":  # which wins little, and not everywhere
        assert sum(row.chosen - row.rtn for row in done.calibration) < 0
    else:
        assert all(row.chosen < row.rtn for row in done.calibration)
    manifest = read_manifest(done.folder)
    assert manifest is not None
    assert manifest.recipe["method"] == method
    assert manifest.calibration is not None
    assert (manifest.calibration.samples, manifest.calibration.length) == (SAMPLES, LENGTH)
    assert manifest.calibration.text == "stories.txt"
    assert not [path.name for path in done.folder.iterdir() if path.name.startswith(".")]
    # Nothing but codes and scales of what the recipe quantizes differs from round-to-nearest.
    plain = convert(source, done.folder.with_name("plain"), Recipe(head="bf16", group_size=32))
    a, b = (load_file(x.folder / "model.safetensors") for x in (done, plain))
    changed = {name for name in a if not torch.equal(a[name], b[name])}
    assert a.keys() == b.keys()
    assert changed
    assert all(name.endswith(("weight_packed", "weight_scale")) for name in changed)
    assert (done.folder / "config.json").read_bytes() == (plain.folder / "config.json").read_bytes()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "method"),
    [("tiny", "gptq+rotate+autoround"), ("hybrid", "gptq"), ("hybrid", "gptq+autoround")],
)
def test_same_bytes_again_on_a_gpu(
    tmp_path: Path,
    text: Path,
    request: pytest.FixtureRequest,
    hashes: Hashes,
    model: str,
    method: str,
) -> None:
    recipe = Recipe(method=Method.parse(method))
    calibration = CalibrationRequest(text, SAMPLES, LENGTH)
    source: Path = request.getfixturevalue(model)
    first, second = (
        hashes(convert(source, tmp_path / n, recipe, device="cuda", calibration=calibration).folder)
        for n in ("a", "b")
    )
    assert first == second


@pytest.mark.commands
def test_resumes_after_any_layer(
    readable: Path,
    hashes: Hashes,
    tmp_path: Path,
    text: Path,
    of_all_steps: dict[str, str],
) -> None:
    recipe = Recipe(method=Method.parse("gptq+rotate+autoround"))
    request = CalibrationRequest(text, SAMPLES, LENGTH)
    out = tmp_path / "resumed"
    for crash in (("calibrate", 1), ("calibrate", 2), ("convert", 9)):
        calls = 0

        def progress(phase: str, done: int, total: int, crash: tuple[str, int] = crash) -> None:
            nonlocal calls
            calls += phase == crash[0]
            if calls > crash[1]:
                raise _StopError

        with pytest.raises(_StopError):
            convert(readable, out, recipe, calibration=request, progress=progress)
        assert not out.exists()
    kept = [path.name for path in partial_of(out).iterdir() if path.name.startswith(PREFIX)]
    assert len(kept) == 2 + 1  # layers, head
    done = convert(readable, out, recipe, calibration=request)
    assert hashes(out) == of_all_steps
    assert len(done.calibration) == 2


def test_goes_on_where_a_layer_was_being_written(
    calibrated: Make, readable: Path, hashes: Hashes, tmp_path: Path, text: Path
) -> None:
    """A kill between writing a layer's file and its renaming leaves it under another name."""
    whole = hashes(calibrated(readable, "weighted").folder)
    recipe = Recipe(method=Method("weighted"))
    request = CalibrationRequest(text, SAMPLES, LENGTH)
    out = tmp_path / "resumed"

    def stop(phase: str, done: int, total: int) -> None:
        if phase == "calibrate" and done > total / 2:
            raise _StopError

    with pytest.raises(_StopError):
        convert(readable, out, recipe, calibration=request, progress=stop)
    partial = partial_of(out)
    layers = sorted(partial.glob(f"{PREFIX}layer*"))
    layers[-1].rename(partial / f".{layers[-1].name}.4711.partial")
    convert(readable, out, recipe, calibration=request)
    assert hashes(out) == whole
    foreign = partial_of(tmp_path / "foreign")
    foreign.mkdir()
    (foreign / ".mine.txt.4711.partial").write_text("x")
    with pytest.raises(ResourceError, match="was not left there by lowbit-convert"):
        convert(readable, tmp_path / "foreign", recipe, calibration=request)


def test_another_text_does_not_take_up_what_is_there(
    readable: Path, hashes: Hashes, tmp_path: Path, text: Path
) -> None:
    other = tmp_path / "other.txt"
    other.write_text("The quick brown fox jumps over the lazy dog. " * 200)
    recipe = Recipe(method=Method("weighted"))

    def made(name: str, text: Path, **options: Any) -> Path:
        request = CalibrationRequest(text, 2, LENGTH)
        return convert(readable, tmp_path / name, recipe, calibration=request, **options).folder

    def crash(phase: str, done: int, total: int) -> None:
        if phase == "convert":
            raise _StopError

    with pytest.raises(_StopError):
        made("next", other, progress=crash)
    assert hashes(made("next", text, overwrite=True)) == hashes(made("fresh", text))


def test_a_quantized_head_and_odd_recipes(calibrated: Make, short: Path) -> None:
    overrides = (
        Override("*.down_proj", 3, 64),
        Override("*.o_proj", 8),
        Override("*.layers.0.*", 16),
    )
    done = calibrated(short, "gptq", head="int4", positive_scales=True, overrides=overrides)
    tensors = load_file(done.folder / "model.safetensors")
    assert all(
        (value > 0).all() for name, value in tensors.items() if name.endswith("weight_scale")
    )
    assert done.plan.schemes["lm_head"] == Scheme(4, 128)
    rtn = convert(
        short,
        done.folder.with_name("rtn"),
        Recipe(head="int4", positive_scales=True, overrides=overrides),
    )
    head = load_file(rtn.folder / "model.safetensors")["lm_head.weight_packed"]
    assert not torch.equal(tensors["lm_head.weight_packed"], head)
    # The layer that stays as it is has nothing to lose but what its input has lost: nothing. MKL
    # rounds the same product otherwise where its operands are aligned otherwise: 3.2e-7 with AVX2.
    assert done.calibration[0].rtn == done.calibration[0].chosen < 1e-6


@pytest.mark.commands
def test_a_rotated_file_is_a_plain_checkpoint(calibrated: Make, short: Path, cli: Cli) -> None:
    overrides = (Override("*.layers.1.mlp.down_proj", 16), Override("*.layers.1.mlp.*_proj", 16))
    done = calibrated(short, "gptq+rotate", overrides=overrides)
    tensors = load_file(done.folder / "model.safetensors")
    source = load_file(short / "model.safetensors")
    norms = [n for n in tensors if n.endswith("layernorm.weight") or n == "model.norm.weight"]
    assert len(norms) == 2 * 2 + 1
    assert all((tensors[name] == 1).all() for name in norms)
    manifest = read_manifest(done.folder)
    assert manifest is not None
    changed = {row.name for row in manifest.source_tensors if row.fate == "rotated"}
    left = {f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert changed == {*norms, "model.embed_tokens.weight", *left}
    assert torch.equal(
        tensors["model.layers.0.self_attn.q_norm.weight"],
        source["model.layers.0.self_attn.q_norm.weight"],
    )
    embedding = tensors["model.embed_tokens.weight"]
    assert embedding.dtype == torch.bfloat16
    assert not torch.equal(embedding, source["model.embed_tokens.weight"])
    ids = torch.randint(0, 512, (4, 64), generator=torch.Generator().manual_seed(0))
    original, packed = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.detach()
        for folder in (short, done.folder)
    )
    p, q = original.log_softmax(-1), packed.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean()
    assert kl < 0.1  # 0.073 on random tokens; a matrix left in the old basis ruins every token
    [found] = [
        row
        for row in measure_weights(open_pair(short, done.folder))
        if row.name.endswith("0.mlp.up_proj")
    ]
    [made] = [row for row in done.weights if row.name == found.name]
    assert found.relative_l2 == pytest.approx(made.relative_l2, rel=1e-6)
    plain = convert(short, done.folder.with_name("plain"), Recipe())
    exported = export(done.folder, done.folder.with_name("exported"), "gptq", dequantize=True)
    [again] = [
        r for r in measure_weights(open_pair(short, exported.folder)) if r.name == found.name
    ]
    assert again.relative_l2 == pytest.approx(found.relative_l2, rel=1e-2)  # FP16 scales
    assert (
        "one is rotated: its weights differ"
        in cli("compare", "--diff", plain.folder, done.folder).stderr
    )


def test_models_that_would_change_are_not_rotated(
    calibrated: Make, tiny: Path, hybrid: Path, cli: Cli, tmp_path: Path
) -> None:
    kept_head = {"head": "bf16"}
    for source, fields, reason, remedy in (
        (hybrid, {}, "its vision tower has no `merger.linear_fc2`", "--drop-vision"),
        (tiny, kept_head, "a head that stays the embedding", "--lm-head int8"),
        (hybrid, {**kept_head, "drop_vision": True}, "a head that stays", "--lm-head int8"),
    ):
        with pytest.raises(QuantizationError, match=reason) as caught:
            calibrated(source, "gptq+rotate", **fields)
        assert remedy in str(caught.value)
        assert caught.value.hint == "leave out +rotate"
    plan = json.loads(cli("plan", hybrid, "--method", "auto", "--device", "cpu", "--json").stdout)
    assert plan["recipe"]["method"] == "gptq"


def test_stages_follow_the_data(tiny: Path, hybrid: Path) -> None:
    expected = {
        (tiny, 0): [
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        ],
        (hybrid, 0): [
            ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
            ("linear_attn.out_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        ],
    }
    for (folder, number), wanted in expected.items():
        model = load_layered_model(open_weights(folder), 8, torch.device("cpu"))
        layer = load_layer(model, number, torch.device("cpu"))
        names = [name for stage in wanted for name in stage]
        assert stages(layer, torch.randn(1, 8, 256), names) == wanted


def test_text_too_short(calibrated: Make, tiny: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Once")
    with pytest.raises(RequestError):
        convert(
            tiny,
            tmp_path / "out",
            Recipe(method=Method("gptq")),
            calibration=CalibrationRequest(short, SAMPLES, LENGTH),
        )
    assert not (tmp_path / "out").exists()
    assert not partial_of(tmp_path / "out").exists()


def test_command(cli: Cli, readable: Path, tmp_path: Path, text: Path) -> None:
    out = tmp_path / "out"
    options = ("--calib", text, "--calib-samples", 8, "--calib-length", 32)
    said = cli(readable, out, "--method", "gptq", *options, "--json")
    assert said.exit_code == 0, said.output
    content = json.loads(said.stdout)
    assert len(content["calibration"]) == 2
    assert {"layer", "rtn", "chosen", "learned", "expert_tokens"} == set(content["calibration"][0])
    shown = cli(readable, tmp_path / "b", "--method", "weighted", *options)
    assert shown.exit_code == 0, shown.output
    wrong = cli(readable, tmp_path / "c", "--method", "awq")
    assert wrong.exit_code == 2
    assert "method `awq` is not known" in wrong.output
    idle = cli(readable, tmp_path / "c", *options)
    assert idle.exit_code == 2
    assert "--calib" in idle.output
