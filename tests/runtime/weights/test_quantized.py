"""A checkpoint quantized at load is the one that the converter writes, tensor by tensor."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.plan.method import ABSMAX
from lowbit.formats.errors import CheckpointError, FormatError, QuantizationError
from lowbit.formats.layout.recipes import Base
from lowbit.formats.layout.scheme import fitting_group_size
from lowbit.formats.safetensors.checkpoint import Checkpoint, open_checkpoint
from lowbit.runtime import load
from lowbit.runtime.cli.main import main
from lowbit.runtime.models.loader import load_decoder, open_model
from lowbit.runtime.weights import weights
from lowbit.runtime.weights.quantized import quantized
from tests.conversions import convert
from tests.lanes import in_commands
from tests.short_models import Shorten

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

MODELS = Path(__file__).parents[3] / "examples" / "models"
TINY = MODELS / "tiny-qwen3"
NAMES = ("tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-qwen3-moe")
DAMAGED = "model.layers.1.mlp.up_proj"


@pytest.fixture
def plain(make_model: Callable[..., "PackedModel"]) -> "PackedModel":
    """A small BF16 model whose rows the recipe's groups divide."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    return make_model(lambda role: None, tie_word_embeddings=True, **sizes)


def leaves(value: Any) -> Iterator[Tensor]:
    """Every tensor of a loaded model, in order."""
    if isinstance(value, Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    elif isinstance(value, tuple):
        for item in value:
            yield from leaves(item)


def assert_like_the_folder(source: Path, folder: Path, base: Base) -> None:
    """Headers, every stored byte, and the model that is loaded from them."""
    ours, theirs = open_model(source, base), open_model(folder)
    assert ours.config == theirs.config
    assert ours.specs == theirs.specs
    assert ours.schemes == theirs.schemes
    assert ours.checkpoint.config == theirs.checkpoint.config
    stored = load_file(folder / "model.safetensors")
    assert ours.checkpoint.tensors.keys() == stored.keys()
    for name, tensor in stored.items():
        assert ours.checkpoint.tensors[name].dtype == tensor.dtype
        read = ours.checkpoint.read(name)
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor), name
    assert ours.weight_bytes("cpu", torch.bfloat16) == theirs.weight_bytes("cpu", torch.bfloat16)
    loaded = [list(leaves(load_decoder(each, "cpu", torch.float32, 64))) for each in (ours, theirs)]
    assert len(loaded[0]) == len(loaded[1]) > 20
    assert all(torch.equal(a, b) for a, b in zip(*loaded, strict=True))


@in_commands("tiny-qwen3-moe-int2", "tiny-qwen3.5-moe-int3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "base"),
    list(zip(NAMES, get_args(Base), strict=True)),
)
def test_same_tensors_and_tokens(tmp_path: Path, name: str, base: Base, shorten: Shorten) -> None:
    source = shorten(name)
    folder = convert(source, tmp_path / "packed", Recipe(base)).folder
    assert_like_the_folder(source, folder, base)
    answers = []
    for path, quantize in ((source, base), (folder, None)):
        model = load(path, device="cpu", context=64, quantize=quantize)
        assert model.options.quantize == quantize
        greedy = dataclasses.replace(model.defaults, temperature=0.0)
        done = model.generate("Once upon", raw=True, sampling=greedy, max_new_tokens=8)
        answers.append(done.token_ids)
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


@in_commands("torch.float16")
@pytest.mark.usefixtures("scales_anew")
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_other_dtypes_in_small_blocks(
    tmp_path: Path, plain: "PackedModel", dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def widen(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2)) * 1e-3
            tensors[name] = (tensor.float() + noise).to(dtype)

    plain.rewrite(widen)
    folder = convert(plain.folder, tmp_path / "packed", Recipe()).folder
    monkeypatch.setattr(weights, "DERIVED_BYTES", 2944)  # 23 or 46 rows, which divide no matrix
    assert_like_the_folder(plain.folder, folder, "int4")


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, 1])
def test_head_beside_the_embedding_that_it_is_tied_to(
    tmp_path: Path, plain: "PackedModel", offset: int
) -> None:
    plain.rewrite(lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + offset}))
    folder = convert(plain.folder, tmp_path / "packed", Recipe("int8")).folder
    assert_like_the_folder(plain.folder, folder, "int8")


def test_memory_is_bounded_by_blocks(plain: "PackedModel", monkeypatch: pytest.MonkeyPatch) -> None:
    """No matrix of the original is read whole, and no scale waits longer than it must."""
    seen: list[tuple[str, int]] = []
    whole = Checkpoint.read_rows

    def read_rows(self: Checkpoint, name: str, start: int, stop: int) -> Tensor:
        seen.append((name, stop - start))
        return whole(self, name, start, stop)

    monkeypatch.setattr(weights, "DERIVED_BYTES", 1024)
    monkeypatch.setattr(Checkpoint, "read_rows", read_rows)
    opened = open_model(plain.folder, "int8")
    assert not seen
    load_decoder(opened, "cpu", torch.bfloat16, 64)
    linears = [spec for spec in opened.specs if spec.quantizable]
    assert max(rows for _, rows in seen) == 1024 // 128
    # Once each: what the search for the codes found is not searched for again.
    rows = sum(count for _, count in seen)
    assert rows == sum(spec.shape[0] for spec in linears)
    waiting = [
        rows.__self__.found  # type: ignore[attr-defined]
        for name, rows in opened.checkpoint.derived.items()
        if name.endswith("weight_packed")
    ]
    assert len(waiting) == len(linears)
    assert not any(waiting)


def test_scales_in_any_order(plain: "PackedModel") -> None:
    made = quantized(open_checkpoint(plain.folder), "int4")
    name = f"{DAMAGED}.weight_scale"
    expected = made.read(name)
    made.read_rows(f"{DAMAGED}.weight_packed", 10, 30)
    parts = [made.read_rows(name, *span) for span in ((0, 5), (5, 17), (17, 256))]
    assert torch.equal(torch.cat(parts), expected)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_damaged_weights_are_named(plain: "PackedModel", value: float) -> None:
    def damage(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DAMAGED}.weight"][200, 3] = value

    plain.rewrite(damage)
    opened = open_model(plain.folder, "int4")
    with pytest.raises(QuantizationError, match=f"`{DAMAGED}.weight` holds NaN or infinite"):
        load_decoder(opened, "cpu", torch.bfloat16, 64)


def test_refusals(make_model: Callable[..., "PackedModel"], tmp_path: Path) -> None:
    packed = make_model()
    with pytest.raises(QuantizationError, match=r"already quantized \(`compressed-tensors`\)") as e:
        open_model(packed.folder, "int4")
    assert str(e.value.hint).startswith("leave out --quantize")
    narrow = make_model(lambda role: None)
    with pytest.raises(QuantizationError, match="method `weighted` changes nothing"):
        load(narrow.folder, device="cpu", quantize="int8", method="weighted")
    narrow.rewrite(lambda tensors: tensors.__delitem__("model.norm.weight"))
    with pytest.raises(FormatError, match=r"`model\.norm\.weight` is missing"):
        open_model(narrow.folder, "int4")
    with pytest.raises(CheckpointError, match="does not exist"):
        open_model(tmp_path / "nowhere", "int4")
    with pytest.raises(QuantizationError, match="recipe `int5` is not known"):
        open_model(TINY, "int5")  # type: ignore[arg-type]


def test_groups_are_lowered_to_what_divides_a_row(make_model: Callable[..., "PackedModel"]) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 256, "head_dim": 32}
    odd = make_model(lambda role: None, **sizes)
    opened = open_model(odd.folder, "int4", 128)
    lowered = {scheme.group_size for name, scheme in opened.schemes.items() if scheme is not None}
    assert lowered == {32, 128}
    for spec in opened.specs:
        scheme = opened.schemes.get(spec.module)
        if scheme is not None:
            assert scheme.group_size == fitting_group_size(spec.shape[1], 128)
    load_decoder(opened, "cpu", torch.bfloat16, 64)
    narrow = make_model(lambda role: None, hidden_size=48, num_attention_heads=2)
    with pytest.raises(QuantizationError, match=r"groups of 128 or less do not divide K = 48"):
        open_model(narrow.folder, "int4")


def test_absmax_is_the_converters(tmp_path: Path, plain: "PackedModel") -> None:
    folder = convert(plain.folder, tmp_path / "packed", Recipe(method=ABSMAX)).folder
    ours = open_model(plain.folder, "int4", rule="absmax").checkpoint
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(ours.read(name), tensor), name


def test_command_lowers_groups_in_one_line(make_model: Callable[..., "PackedModel"]) -> None:
    folder = make_model(lambda role: None, hidden_size=96, intermediate_size=256).folder
    short = ("--max-new-tokens", "1", "--device", "cpu", "--raw")
    done = CliRunner().invoke(main, ["generate", str(folder), "Hi", "--quantize", "int4", *short])
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stderr.splitlines() if "group size" in line]
    assert lines == ["group size: 128 does not divide the rows of some linears; lowered 11 to 32"]
    for option in (("--group-size", "64"), ("--method", "rtn")):
        refused = CliRunner().invoke(main, ["generate", str(folder), "Hi", *option])
        assert refused.exit_code == 2
        assert f"{option[0]} needs --quantize" in refused.stderr


@pytest.mark.commands
def test_commands(tmp_path: Path, make_model: Callable[..., "PackedModel"]) -> None:
    def run(*arguments: str, stdin: str = "") -> Any:
        return CliRunner().invoke(main, [*arguments, "--device", "cpu"], input=stdin)

    options = ("--quantize", "int8", "--json", "--context", "64", "--activations", "int8")
    short = ("--max-new-tokens", "2", "--temperature", "0")
    for command, rest, stdin in (
        ("generate", ("Once", *short), ""),
        ("chat", short, "Hi\n"),
        ("bench", ("--prompt-tokens", "4", "--new-tokens", "2", "--runs", "1"), ""),
    ):
        done = run(command, str(TINY), *rest, *options, stdin=stdin)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert (found["quantized_at_load"], found["activations"]) == ("int8", "int8")
        assert "quantized at load: int8, " in done.stderr
        assert "activations: int8 in all quantized linears but the head" in done.stderr
    plain = run("generate", str(TINY), "Once", *short, "--json", "--context", "64")
    found = json.loads(plain.stdout)
    assert (found["quantized_at_load"], found["activations"]) == (None, "exact")
    assert "at load" not in plain.stderr
    assert "activations" not in plain.stderr
    refused = run("generate", str(make_model().folder), "Hi", "--quantize", "int4")
    assert refused.exit_code == 1
    assert "already quantized" in refused.stderr
    assert "hint: leave out --quantize" in refused.stderr
