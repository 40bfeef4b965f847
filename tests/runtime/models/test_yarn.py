"""YaRN through the runtime, against transformers, before and beyond the original positions."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

import lowbit.runtime as lowbit
from lowbit.formats.architectures import read_config
from lowbit.formats.errors import RequestError
from lowbit.runtime.state.rope import rope_tables
from tests.lanes import in_commands
from tests.runtime.hub_logits import hub_logits

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

ORIGINAL = 40  # positions; IDS go far beyond
IDS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(5)).tolist()
# Of 16 pairs of dimensions some turn often in 40 positions, some hardly; 8 turns begin the ramp.
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
    "beta_fast": 8,
}
PARTIAL: dict[str, Any] = {
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [3, 3, 2],
    "mrope_interleaved": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("make_model", {"rope_scaling": YARN}),
    "qwen3-parameters": (
        "make_model",
        {"rope_parameters": YARN | {"rope_theta": 10000.0}, "rope_theta": None},
    ),
    "qwen3-mscales": ("make_model", {"rope_scaling": YARN | {"mscale": 2, "mscale_all_dim": 0.5}}),
    "qwen2.5": ("make_model", {"rope_scaling": YARN, "model_type": "qwen2", "head_dim": None}),
    "qwen3-experts": ("make_experts", {"hybrid": False, "rope_scaling": YARN}),
    "qwen3.5": ("make_qwen3_5", {"rope_parameters": PARTIAL | YARN}),
    "qwen3.5-untruncated": (
        "make_qwen3_5",
        {"rope_parameters": PARTIAL | YARN | {"truncate": False, "attention_factor": 1.5}},
    ),
}

Reference = Callable[["PackedModel"], Any]


@pytest.fixture(params=MODELS)
def yarned(request: pytest.FixtureRequest) -> "PackedModel":
    """A random model with YaRN whose config still states its original positions."""
    make, changes = MODELS[request.param]
    packed: PackedModel = request.getfixturevalue(make)(**changes, max_position_embeddings=ORIGINAL)
    return packed


@in_commands("qwen3.5-untruncated", "qwen2.5")
def test_fp32_logits_match_transformers_at_every_position(
    yarned: "PackedModel", reference: Reference, set_chunk: Callable[[int], None]
) -> None:
    expected = hub_logits(reference(yarned), IDS)
    model = lowbit.load(yarned.folder, device="cpu", dtype=torch.float32)
    for chunk in (512, 7):
        set_chunk(chunk)
        off = (model.logits(IDS).double() - expected.double()).abs().amax(dim=1)
        off /= expected.abs().max()
        assert off[:ORIGINAL].max() < 1e-4
        assert off[ORIGINAL:].max() < 1e-4


def test_without_yarn_the_logits_are_others(make_model: Any) -> None:
    """What the test above compares does depend on the scaling, from the first positions on."""
    sizes = {"max_position_embeddings": 160}
    with_yarn, plain = (
        lowbit.load(make_model(**sizes, **more).folder, device="cpu", dtype=torch.float32)
        for more in ({"rope_scaling": YARN}, {})
    )
    off = (with_yarn.logits(IDS) - plain.logits(IDS)).abs().amax(dim=1)
    assert off[0] == 0  # nothing is rotated, and one key alone has all attention
    assert off[1:ORIGINAL].max() > 0.01
    assert off[ORIGINAL:].max() > 0.01


def test_the_context_is_the_extended_one(make_model: Any) -> None:
    folder = make_model(rope_scaling=YARN, max_position_embeddings=ORIGINAL).folder
    assert lowbit.load(folder, device="cpu").context == 160
    assert lowbit.load(folder, device="cpu", context=160).context == 160
    with pytest.raises(RequestError, match="context 161: the model has positions for 1 to 160"):
        lowbit.load(folder, device="cpu", context=161)


@pytest.mark.parametrize(
    ("positions", "original", "factor"), [(131072, 32768, 4.0), (1048576, 262144, 4.0)]
)
def test_tables_of_the_cards_are_those_of_transformers_to_the_bit(
    positions: int, original: int, factor: float
) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    content = {
        "model_type": "qwen3",
        "vocab_size": 256,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,  # of 131,072 positions, so few dimensions are enough
        "max_position_embeddings": original,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        },
    }
    config = read_config(content)
    assert config.max_position_embeddings == positions
    rope = rope_tables(positions, config.rotary_dim, config.rope_theta, "cpu", config.rope_scaling)
    some = torch.tensor([[0, 1, 77, original - 1, original, positions // 2 + 1, positions - 1]])
    cos, sin = Qwen3RotaryEmbedding(Qwen3Config(**content))(torch.zeros(1), some)
    assert torch.equal(rope.cos[some[0]], cos[0, :, :8])
    assert torch.equal(rope.sin[some[0]], sin[0, :, :8])
