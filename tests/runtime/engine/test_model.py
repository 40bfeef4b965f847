"""The runtime's logits and greedy tokens against transformers on the dequantized weights."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.errors import RequestError
from lowbit.formats.layout.scheme import Scheme
from tests.lanes import in_commands
from tests.runtime.hub_logits import distance, error_ratio, hub_logits, in_bf16

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

GREEDY = lowbit.SamplingParams()
IDS = torch.randint(256, (41,), generator=torch.Generator().manual_seed(2)).tolist()

Make = Callable[..., "PackedModel"]
Reference = Callable[["PackedModel"], Any]


def mixed(role: str) -> Scheme:
    return {"attention": Scheme(8, 32), "mlp": Scheme(4, 32), "head": Scheme(8, 64)}[role]


def narrow(role: str) -> Scheme:
    return {"attention": Scheme(3, 32), "mlp": Scheme(2, 32), "head": Scheme(8, 64)}[role]


MODELS: dict[str, dict[str, Any]] = {
    "int4-g32": {"schemes": lambda role: Scheme(4, 32)},
    "int4-g64-mqa": {
        "schemes": lambda role: Scheme(4, 64),
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
    },
    "int8-g32-tied": {"schemes": lambda role: Scheme(8, 32), "tie_word_embeddings": True},
    "int8-row": {"schemes": lambda role: Scheme(8, None), "num_key_value_heads": 4},
    "int4-row": {"schemes": lambda role: Scheme(4, None), "head_dim": 16},
    "mixed": {"schemes": mixed, "num_hidden_layers": 3},
    "int3-g32": {"schemes": lambda role: Scheme(3, 32)},
    "int2-g32": {"schemes": narrow},
    "int3-and-int2-row": {"schemes": lambda role: Scheme(2 if role == "mlp" else 3, None)},
    "head-dense": {"schemes": lambda role: None if role == "head" else Scheme(4, 32)},
    "dense": {"schemes": lambda role: None},
}


@pytest.fixture(params=MODELS)
def packed(request: pytest.FixtureRequest, make_model: Make) -> "PackedModel":
    return make_model(**MODELS[request.param])


def test_fp32_logits_match_transformers(
    packed: "PackedModel", reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    expected = hub_logits(reference(packed), IDS)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    assert distance(model.logits(IDS), expected) < 1e-4
    set_chunk(7)  # 41 = 5 * 7 + 6
    assert distance(model.logits(IDS), expected) < 1e-4


@in_commands("int3-g32", "int4-g32", "int8-row", "head-dense")
@in_commands("int2-g32", "int4-row")
def test_fp32_token_by_token_matches_transformers(
    packed: "PackedModel", reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    expected = hub_logits(reference(packed), IDS)
    set_chunk(1)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    assert distance(model.logits(IDS), expected) < 1e-4


def test_bf16_is_no_further_off_than_transformers_in_bf16(
    packed: "PackedModel", reference: Reference
) -> None:
    hub = reference(packed)
    exact = hub_logits(hub, IDS)
    rounded = hub_logits(in_bf16(hub), IDS)
    ours = lowbit.load(packed.folder, device="cpu").logits(IDS)
    assert error_ratio(ours, rounded, exact) < 1.15  # at most 0.95 with products in FP32 or BF16


def test_bf16_is_no_further_off_at_large_positions(make_model: Make, reference: Reference) -> None:
    """The error of an angle by a rounded frequency grows with the position."""
    ids = torch.randint(256, (2000,), generator=torch.Generator().manual_seed(2)).tolist()
    packed = make_model(max_position_embeddings=len(ids) + 48)
    hub = reference(packed)
    exact = hub_logits(hub, ids)
    rounded = hub_logits(in_bf16(hub), ids)
    ours = lowbit.load(packed.folder, device="cpu").logits(ids)
    assert error_ratio(ours, rounded, exact) < 1.1  # 0.90; 1.44 if ours were rounded


@pytest.mark.parametrize("schemes", [mixed, narrow])
def test_the_file_means_the_same_to_compressed_tensors(
    make_model: Make, schemes: Callable[[str], Scheme]
) -> None:
    import transformers

    packed = make_model(schemes)
    hub = transformers.AutoModelForCausalLM.from_pretrained(packed.folder, dtype=torch.float32)
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    assert distance(model.logits(IDS), hub_logits(hub, IDS)) < 1e-4


def test_greedy_tokens_match_transformers(make_model: Make, reference: Reference) -> None:
    packed = make_model()
    hub = reference(packed)
    expected = list(IDS)
    for _ in range(30):
        expected.append(int(hub_logits(hub, expected)[-1, :261].argmax()))
    model = lowbit.load(packed.folder, device="cpu", dtype=torch.float32)
    assert list(model.engine.generate(IDS, GREEDY, 30)) == expected[len(IDS) :]


def test_padding_rows_are_never_chosen(make_model: Make) -> None:
    packed = make_model(lambda role: None)

    def favour_padding(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"][261:] *= 100

    packed.rewrite(favour_padding)
    model = lowbit.load(packed.folder, device="cpu")
    assert int(model.logits(IDS)[-1].argmax()) >= 261
    hot = lowbit.SamplingParams(temperature=5.0, seed=1)
    for params in (GREEDY, hot):
        assert max(model.engine.generate(IDS, params, 40)) < 261


@in_commands("dtype0")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_is_the_same_on_every_run(make_model: Make, dtype: torch.dtype) -> None:
    packed = make_model(mixed)
    model = lowbit.load(packed.folder, device="cpu", dtype=dtype)
    first = list(model.engine.generate(IDS, GREEDY, 50))
    again = list(model.engine.generate(IDS, GREEDY, 50))
    fresh = lowbit.load(packed.folder, device="cpu", dtype=dtype)
    assert first == again == list(fresh.engine.generate(IDS, GREEDY, 50))


def test_context_must_fit_the_model(make_model: Make) -> None:
    folder = make_model().folder
    assert lowbit.load(folder, device="cpu").context == 256
    assert lowbit.load(folder, device="cpu", context=20).context == 20
    with pytest.raises(RequestError, match="context 257: the model has positions for 1 to 256"):
        lowbit.load(folder, device="cpu", context=257)
