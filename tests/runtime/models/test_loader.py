"""Folders that cannot be served: one clear error each, before any weight is read."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from lowbit.convert.measure.rounded_inputs import NORMED
from lowbit.formats.errors import (
    CheckpointError,
    FormatError,
    LowbitError,
    QuantizationError,
    RequestError,
    UnsupportedModelError,
)
from lowbit.formats.head_rows import PackedRows
from lowbit.formats.layout.scheme import Scheme
from lowbit.runtime import load
from lowbit.runtime.backends.cpu_linear import prepare
from lowbit.runtime.models import loader
from lowbit.runtime.models.loader import load_decoder, open_model, with_activations
from lowbit.runtime.state.rope import Rope
from lowbit.runtime.weights.linear import DenseLinear, Linear, PackedLinear
from tests.runtime.conftest import ROWS
from tests.runtime.dense_embedding import dense_embedding

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

Tensors = dict[str, Tensor]
Config = dict[str, Any]
UP = "model.layers.1.mlp.up_proj"
Q, K = "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj"


@pytest.fixture
def packed(make_model: "Callable[..., PackedModel]") -> "PackedModel":
    return make_model()


def refuses(packed: "PackedModel", kind: type[LowbitError], message: str) -> LowbitError:
    with pytest.raises(kind, match=re.escape(message)) as caught:
        load(packed.folder, device="cpu")
    return caught.value


def drop(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: void(tensors.pop(name))


def put(name: str, value: Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value})


def void(_: object) -> None:
    return None


DAMAGE: dict[str, tuple[Callable[[Tensors], None], str]] = {
    "missing norm": (drop("model.norm.weight"), "`model.norm.weight` is missing"),
    "missing scale": (drop(f"{UP}.weight_scale"), f"`{UP}.weight_scale` is missing"),
    "extra": (
        put("model.layers.2.x.weight", torch.zeros(1)),
        "`model.layers.2.x.weight`: the architecture has no such tensor",
    ),
    "misshapen codes": (
        put(f"{UP}.weight_packed", torch.zeros(96, 7, dtype=torch.int32)),
        f"`{UP}.weight_packed`: expected shape [96, 8], got [96, 7]",
    ),
    "misshapen norm": (
        put("model.norm.weight", torch.zeros(65, dtype=torch.bfloat16)),
        "`model.norm.weight`: expected shape [64], got [65]",
    ),
    "flipped scale dtype": (
        put(f"{UP}.weight_scale", torch.zeros(96, 2, dtype=torch.int16)),
        f"`{UP}.weight_scale`: expected dtype bfloat16 or float16 or float32, got int16",
    ),
    "codes as bytes": (
        put(f"{UP}.weight_packed", torch.zeros(96, 8, dtype=torch.uint8)),
        f"`{UP}.weight_packed`: expected dtype int32, got uint8",
    ),
    "zero point": (
        put(f"{UP}.weight_zero_point", torch.zeros(12, 2, dtype=torch.int32)),
        f"`{UP}.weight_zero_point`: config.json says symmetric, the file has zero points",
    ),
    "activation order": (
        put(f"{UP}.weight_g_idx", torch.zeros(64, dtype=torch.int32)),
        f"`{UP}.weight_g_idx`: activation-ordered groups are not supported",
    ),
    "wrong weight_shape": (
        put(f"{UP}.weight_shape", torch.tensor([96, 63])),
        f"`{UP}.weight_shape`: expected [96, 64], got [96, 63]",
    ),
    "nan scale": (
        put(f"{UP}.weight_scale", torch.full((96, 2), float("nan"), dtype=torch.bfloat16)),
        f"`{UP}.weight_scale` holds NaN or Inf",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_tensors_are_named(packed: "PackedModel", name: str) -> None:
    change, message = DAMAGE[name]
    packed.rewrite(change)
    refuses(packed, FormatError, message)


def group(config: Config) -> Config:
    found: Config = config["quantization_config"]["config_groups"]["group_0"]
    return found


SCHEMES: dict[str, tuple[Callable[[Config], None], type[LowbitError], str]] = {
    "five bits": (
        lambda c: group(c)["weights"].update(num_bits=5),
        FormatError,
        f"`{Q}`: 5-bit weights (served: 2, 3, 4, 8) cannot be served",
    ),
    "asymmetric": (
        lambda c: group(c)["weights"].update(symmetric=False),
        FormatError,
        f"`{Q}.weight_zero_point` is missing",
    ),
    "asymmetric bytes": (
        lambda c: group(c)["weights"].update(symmetric=False, num_bits=8),
        FormatError,
        f"`{Q}`: asymmetric 8-bit weights (zero points) cannot be served",
    ),
    "activations": (
        lambda c: group(c).update(input_activations={"num_bits": 8}),
        FormatError,
        "`input_activations` is set",
    ),
    "other method": (
        lambda c: c["quantization_config"].update(quant_method="bitsandbytes"),
        FormatError,
        "quantization method `bitsandbytes` is not supported",
    ),
    "other layout": (
        lambda c: group(c).update(format="marlin-24"),
        FormatError,
        "format `marlin-24`",
    ),
    "group that does not divide": (
        lambda c: group(c)["weights"].update(group_size=48),
        QuantizationError,
        f"`{Q}`: group size 48 does not divide K = 64",
    ),
    "config without quantization": (
        lambda c: void(c.pop("quantization_config")),
        FormatError,
        f"`{Q}.weight` is missing: config.json leaves `{Q}` unquantized, the file does not",
    ),
    "fused set with two schemes": (
        lambda c: c["quantization_config"]["ignore"].append("re:.*layers[.]0[.].*k_proj$"),
        FormatError,
        f"`{K}` is not quantized but `{Q}` is INT4 g32: they are fused and need one scheme",
    ),
    "head said to be dense": (
        lambda c: c["quantization_config"]["ignore"].append("lm_head"),
        FormatError,
        "`lm_head.weight` is missing: config.json leaves `lm_head` unquantized",
    ),
    "unknown model": (
        lambda c: c.update(model_type="mamba"),
        UnsupportedModelError,
        "model_type `mamba` is not supported",
    ),
    "rope scaling": (
        lambda c: c.update(rope_scaling={"rope_type": "dynamic", "factor": 4}),
        UnsupportedModelError,
        "rope scaling `dynamic` is not implemented",
    ),
    "missing size": (
        lambda c: void(c.pop("hidden_size")),
        UnsupportedModelError,
        "config.json lacks `hidden_size`",
    ),
}


@pytest.mark.parametrize("name", SCHEMES)
def test_unserved_configs_are_named(packed: "PackedModel", name: str) -> None:
    change, kind, message = SCHEMES[name]
    packed.reconfigure(change)
    error = refuses(packed, kind, message)
    if name == "unknown model":
        assert error.hint is not None
        assert "qwen3" in error.hint


def test_config_says_packed_but_the_file_is_dense(
    make_model: "Callable[..., PackedModel]",
) -> None:
    quantized, dense = make_model(), make_model(lambda role: None)
    section = json.loads((quantized.folder / "config.json").read_text())["quantization_config"]
    dense.reconfigure(lambda config: config.update(quantization_config=section))
    refuses(dense, FormatError, f"config.json says INT4 g32, the file holds `{Q}.weight`")


def test_a_truncated_file_is_refused(packed: "PackedModel") -> None:
    path = packed.folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    refuses(packed, CheckpointError, "is cut short")
    path.write_bytes(content[:5])
    refuses(packed, CheckpointError, "cut short")


def test_a_foreign_manifest_is_refused(packed: "PackedModel") -> None:
    (packed.folder / "lowbit.json").write_text(json.dumps({"format_version": 99}))
    refuses(packed, FormatError, "format version 99, this release reads 1")


def test_what_is_not_a_checkpoint_is_refused(packed: "PackedModel") -> None:
    (packed.folder / "model.safetensors").unlink()
    refuses(packed, CheckpointError, "is not a checkpoint: it holds no .safetensors file")
    (packed.folder / "config.json").unlink()
    refuses(packed, CheckpointError, "it has no config.json")
    with pytest.raises(CheckpointError, match="is neither a folder nor a model on the Hub"):
        load(packed.folder / "nowhere", device="cpu")


def test_float16_scales_that_survive_are_served(packed: "PackedModel") -> None:
    ids = [1, 2, 3]
    before = load(packed.folder, device="cpu", dtype=torch.float32).logits(ids)

    def widen(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].to(torch.float32)

    packed.rewrite(widen)
    assert torch.equal(load(packed.folder, device="cpu", dtype=torch.float32).logits(ids), before)


@pytest.mark.parametrize("equal", [True, False])
def test_head_beside_the_embedding_that_it_is_tied_to(
    make_model: "Callable[..., PackedModel]", equal: bool
) -> None:
    packed = make_model(lambda role: None, tie_word_embeddings=True)

    def add_head(tensors: Tensors) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.clone() if equal else embedding.flip(0).contiguous()

    before = load(packed.folder, device="cpu").logits([1, 2])
    packed.rewrite(add_head)
    found = load(packed.folder, device="cpu").logits([1, 2])
    assert torch.equal(found, before) == equal
    packed.reconfigure(lambda config: config.update(tie_word_embeddings=False))
    assert torch.equal(load(packed.folder, device="cpu").logits([1, 2]), found)


def test_a_tied_head_shares_the_embedding(make_model: "Callable[..., PackedModel]") -> None:
    opened = open_model(make_model(tie_word_embeddings=True).folder)
    decoder = load_decoder(opened, "cpu", torch.bfloat16, 16)
    assert isinstance(decoder.head, DenseLinear)
    assert decoder.head.weight.data_ptr() == dense_embedding(decoder).data_ptr()


@pytest.mark.parametrize("rotated", [False, True], ids=["", "rotated"])
@pytest.mark.parametrize("kind", ["dense", "experts", "hybrid"])
def test_activations_reach_every_packed_linear_but_heads(
    make_model: "Callable[..., PackedModel]",
    make_experts: "Callable[..., PackedModel]",
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    rotated: bool,
) -> None:
    """By the tensor table: a head is known by the vocabulary, or the rows of the draft head.

    Linears behind norms have one scale a token in a rotated model, as the report takes them.
    """
    makers: dict[str, Callable[[], PackedModel]] = {
        "dense": make_model,
        "experts": partial(make_experts, False),
        "hybrid": partial(make_experts, True, mtp_num_hidden_layers=1),
    }
    made = makers[kind]()
    opened = with_activations(open_model(made.folder, head=True), "int8")
    assert not opened.rotated
    opened = replace(opened, rotated=rotated)
    if opened.head:
        codes = torch.zeros(48, 16, dtype=torch.int32)
        ids, scale = torch.arange(48, dtype=torch.int32), torch.ones(48, 1, dtype=torch.bfloat16)
        opened = replace(opened, draft=PackedRows(ids, codes, scale, Scheme(8, 64)))
    seen: dict[str, list[int]] = {kind: [] for kind in ("exact", "int8", "whole", "int16", "dense")}

    def recorded(w: Linear, dtype: torch.dtype, inputs: str) -> Any:
        seen[inputs if isinstance(w, PackedLinear) else "dense"].append(w.N * w.K)
        return prepare(w, dtype)

    monkeypatch.setattr(loader, "prepare", recorded)
    load_decoder(opened, "cpu", torch.bfloat16, 16)
    inner = [spec for spec in opened.specs if spec.quantizable and spec.role != "head"]
    whole = [spec for spec in inner if rotated and spec.module.endswith(NORMED)]
    assert sum(seen["whole"]) == sum(math.prod(spec.shape) for spec in whole)
    assert bool(whole) == rotated
    assert sum(seen["int8"] + seen["whole"]) == sum(math.prod(spec.shape) for spec in inner)
    assert seen["int16"] == [ROWS * 64]
    assert seen["exact"] == ([48 * 64] if opened.head else [])
    gates = [spec for spec in opened.specs if spec.role == "delta_gate" and len(spec.shape) == 2]
    assert sum(seen["dense"]) == sum(math.prod(spec.shape) for spec in gates)


def test_int8_activations_need_a_packed_linear(make_model: "Callable[..., PackedModel]") -> None:
    """A quantized head alone changes nothing either."""
    for scheme in (None, Scheme(8, 32)):
        folder = make_model(lambda role, it=scheme: it if role == "head" else None).folder
        assert load(folder, device="cpu").options.activations == "exact"
        with pytest.raises(RequestError, match="`activations` int8 changes nothing") as caught:
            load(folder, device="cpu", activations="int8")
        offered = "--quantize int4" in (caught.value.hint or "")
        assert offered == (scheme is None)  # a folder with packed weights refuses it
    plain = make_model(lambda role: None).folder
    load(plain, device="cpu", activations="int8", quantize="int8", group_size=32)


def test_a_packed_drafter_is_enough_for_int8(make_model: "Callable[..., PackedModel]") -> None:
    plain = open_model(make_model(lambda role: None).folder)
    packed = open_model(make_model(lambda role: Scheme(4, 32)).folder)
    found = with_activations(replace(plain, drafter=packed), "int8")
    assert found.drafter is not None
    assert (found.activations, found.drafter.activations) == ("int8", "int8")
    with pytest.raises(RequestError, match="changes nothing"):
        with_activations(replace(plain, drafter=plain), "int8")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, 32), Scheme(8, None), Scheme(8, 32), Scheme(3, 32), Scheme(2, None), None]
)
def test_memory_is_known_before_loading(
    make_model: "Callable[..., PackedModel]", dtype: torch.dtype, scheme: Scheme | None
) -> None:
    plain = open_model(make_model(lambda role: scheme).folder)
    for opened in (plain, with_activations(plain, "int8")) if scheme else (plain,):
        decoder = load_decoder(opened, "cpu", dtype, 16)
        parts = (decoder.embedding, decoder.norm, decoder.head, decoder.layers)
        assert opened.weight_bytes("cpu", dtype) == nbytes_in(parts)


def nbytes_in(part: Any) -> int:
    """Bytes of all weights below a tuple or dataclass; rotation tables are none."""
    if isinstance(part, Tensor):
        return part.nbytes
    if isinstance(part, tuple):
        return sum(nbytes_in(item) for item in part)
    if is_dataclass(part) and not isinstance(part, Rope):
        return sum(nbytes_in(getattr(part, item.name)) for item in fields(part))
    return 0
