"""The head for multi-token prediction, against layers of transformers, and what it drafts."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.activation_modes import Activations
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.layout.packing import dequantize, unpack
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stats import Tally
from lowbit.runtime.models.loader import load_decoder, open_model
from lowbit.runtime.state.device_state import new_state
from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.step_buffers import lone_step
from tests.conversions import convert
from tests.lanes import in_commands
from tests.runtime.dense_embedding import dense_embedding
from tests.short_models import Shorten

if TYPE_CHECKING:
    from tests.runtime.conftest import PackedModel

EXAMPLES = Path(__file__).parents[4] / "examples"
TRAINED = EXAMPLES / "models" / "tiny-qwen3.5"
IDS = torch.randint(256, (70,), generator=torch.Generator().manual_seed(3))
GREEDY = lowbit.SamplingParams(logprobs=1)
STRICT = lowbit.SamplingParams(0.7, presence_penalty=0.5, frequency_penalty=0.2, seed=4)
HOT = lowbit.SamplingParams(0.8, top_k=20, top_p=0.95, seed=5, logprobs=1)


def embeddings_of(packed: "PackedModel", ids: Tensor) -> Tensor:
    """Rows of the table."""
    weights = packed.weights
    return next(t for n, t in weights.items() if n.endswith("embed_tokens.weight")).float()[ids]


def head_of_transformers(
    packed: "PackedModel", embedded: Tensor, hidden: Tensor, axes: Tensor | None = None
) -> Tensor:
    """Outputs of the head after its norm, by a model of transformers with its layer alone.

    Args:
        embedded: [T, h], tokens behind each position.
        hidden: [T, h], the trunk's after its norm.
        axes: [3, T], positions on three axes; None for 0, 1, 2...
    """
    import transformers

    from tests.runtime.conftest import HUB_CLASSES, with_fused_experts

    changes = {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    names = HUB_CLASSES[packed.config["model_type"]]
    model_class = getattr(transformers, names[0].replace("ForCausalLM", "TextModel"))
    config_class = getattr(transformers, names[1])
    config = config_class(**{**packed.config, **changes}, attn_implementation="eager")
    model = model_class(config).float().eval()
    weights = {name: tensor.float() for name, tensor in packed.weights.items()}
    own = {
        name.removeprefix("mtp."): tensor
        for name, tensor in weights.items()
        if name.startswith(("mtp.layers.", "mtp.norm"))
    }
    missing = model.load_state_dict(with_fused_experts(own), strict=False)
    assert missing.missing_keys == ["embed_tokens.weight"]
    assert not missing.unexpected_keys

    def normed(x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + config.rms_norm_eps)
        return x * scale * (1 + weights[f"mtp.{name}.weight"])

    joined = torch.cat(
        (normed(embedded, "pre_fc_norm_embedding"), normed(hidden, "pre_fc_norm_hidden")), dim=1
    )
    with torch.no_grad():
        inputs = (joined @ weights["mtp.fc.weight"].T)[None]
        found = model(inputs_embeds=inputs, position_ids=None if axes is None else axes[:, None])
    last: Tensor = found.last_hidden_state[0]
    return last


@pytest.mark.parametrize("parts", [(70,), (40, 30), (37, *[1] * 20, 13)])
def test_the_head_is_that_of_the_checkpoint(
    make_qwen3_5: "Callable[..., PackedModel]", parts: tuple[int, ...]
) -> None:
    assert_like_transformers(make_qwen3_5(mtp_num_hidden_layers=1), parts)


def test_a_head_of_experts_is_that_of_the_checkpoint(
    make_experts: "Callable[..., PackedModel]",
) -> None:
    packed = make_experts(True, lambda role: None, mtp_num_hidden_layers=1)
    assert_like_transformers(packed, (37, *[1] * 20, 13))


def assert_like_transformers(packed: "PackedModel", parts: tuple[int, ...]) -> None:
    decoder = load_decoder(open_model(packed.folder, head=True), "cpu", torch.float32, 128)
    head: Any = decoder.mtp
    hidden = torch.randn(
        70, packed.config["hidden_size"], generator=torch.Generator().manual_seed(1)
    )
    state = new_state(decoder.config, 4, 2, torch.float32, "cpu", head=True)
    found, first = [], 0
    for count in parts:
        part = slice(first, first + count)
        step = lone_step(count, "cpu", first, prompt=count > 16)
        found.append(head.hidden(IDS[part], hidden[part], state, step))
        first += count
    norm, eps = decoder.ops.rms_norm, decoder.config.rms_norm_eps
    embedded = embeddings_of(packed, IDS)
    expected = head_of_transformers(packed, embedded, norm(hidden, decoder.norm, eps))
    normed = norm(torch.cat(found), head.norm, eps)
    assert (normed - expected).abs().max() < 1e-5 * expected.abs().max()
    logits = expected @ dense_embedding(decoder).T if decoder.config.tie_word_embeddings else None
    if logits is not None:
        assert (
            head.output.logits(torch.cat(found)) - logits
        ).abs().max() < 1e-4 * logits.abs().max()


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained(request: pytest.FixtureRequest, shorten: Shorten) -> dict[str, lowbit.Model]:
    """Two layers of the bundled model and its head, by what drafts for them."""
    dtype, folder = getattr(torch, request.param), shorten("tiny-qwen3.5")
    return {
        mode: lowbit.load(folder, device="cpu", dtype=dtype, context=400, speculate=mode)
        for mode in ("off", "mtp" if dtype == torch.float32 else "auto")
    }


def requests(model: lowbit.Model, count: int = 9) -> list[Request]:
    text = (EXAMPLES / "data" / "stories-eval.txt").read_text()
    starts = ("Once upon a time, a little robot", text[:700], "Lily")
    return [
        Request(
            tuple(model.tokenizer.encode(start, framed=True, context=400)),
            (GREEDY, HOT, STRICT)[number],
            count,
        )
        for number, start in enumerate(starts)
    ]


@in_commands("float32")
def test_drafts_of_a_trained_head_change_nothing(trained: dict[str, lowbit.Model]) -> None:
    for mode, model in trained.items():
        if mode != "off":
            assert_same_answers(trained["off"], model)


@in_commands("tiny-qwen3-moe-ngram")
@pytest.mark.parametrize(
    ("name", "mode"),
    [("tiny-qwen3.5-moe", "mtp"), ("tiny-qwen3-moe", "ngram")],
)
def test_drafts_change_nothing_for_experts(name: str, mode: Mode, shorten: Shorten) -> None:
    plain, drafted = (
        lowbit.load(shorten(name), device="cpu", context=400, quantize="int4", speculate=each)
        for each in ("off", mode)
    )
    assert_same_answers(plain, drafted)
    if mode == "mtp":
        assert drafted.engine.decoder.mtp is not None


def assert_same_answers(one: lowbit.Model, other: lowbit.Model) -> None:
    """With drafts and without, alone, in a further turn, and together."""
    plain, drafted, alone = one.engine, other.engine, []
    for request in requests(one):
        expected, found = plain.submit(request), drafted.submit(request)
        alone.append(expected.result())
        assert found.result() == alone[-1]
        assert found.log_probabilities == expected.log_probabilities
        turn = replace(request, prompt=(*request.prompt, *found.result(), 9, 8))
        expected, found = plain.submit(turn), drafted.submit(turn)
        assert found.result() == expected.result()
        assert found.reused == expected.reused > 0
    drafted.forget()
    together = [drafted.submit(request) for request in requests(one)]
    assert [handle.result() for handle in together] == alone


@pytest.mark.commands
def test_a_trained_head_is_right_as_often_as_measured() -> None:
    """Its first draft agrees with 84 % of the trunk's choices on the report's text."""
    model = lowbit.load(TRAINED, device="cpu", context=400, speculate="mtp")
    all_of_them = Tally()
    for request in requests(model, 70):
        handle = model.engine.submit(request)
        handle.result()
        all_of_them.add(handle.tally)
    assert 0.7 < all_of_them.accepted[0] / all_of_them.drafted[0] < 0.95
    assert all_of_them.tokens_a_round is not None
    assert all_of_them.tokens_a_round > 1.7
    assert all_of_them.rounds > 55  # for 210 tokens, a third with penalties


def test_a_model_without_the_head_is_refused_by_name(
    make_qwen3_5: "Callable[..., PackedModel]", make_model: "Callable[..., PackedModel]"
) -> None:
    for packed in (make_qwen3_5(), make_model()):
        with pytest.raises(UnsupportedModelError, match="no head for multi-token prediction"):
            lowbit.load(packed.folder, device="cpu", speculate="mtp")
        model = lowbit.load(packed.folder, device="cpu", speculate="auto")
        assert isinstance(model.engine.drafting, Drafts)
        assert model.engine.drafting.made is None


def test_a_head_of_two_layers_is_refused(make_qwen3_5: "Callable[..., PackedModel]") -> None:
    packed = make_qwen3_5(mtp_num_hidden_layers=2)
    assert lowbit.load(packed.folder, device="cpu").engine.decoder.mtp is None
    with pytest.raises(UnsupportedModelError, match="2 layers, only one"):
        lowbit.load(packed.folder, device="cpu", speculate="mtp")


@pytest.fixture(scope="module")
def small_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model, packed, with a draft head of 1,500 of its 4,096 tokens."""
    folder = tmp_path_factory.mktemp("packed") / "int4"
    convert(TRAINED, folder, Recipe(base="int4", draft_vocabulary=1500))
    return folder


def test_drafts_are_chosen_from_the_rows_of_the_draft_head(small_draft: Path) -> None:
    opened = open_model(small_draft, head=True)
    head: Any = load_decoder(opened, "cpu", torch.float32, 128).mtp
    draft = opened.draft
    assert draft is not None
    rows = dequantize(unpack(draft.packed, 4, head.trunk.config.hidden_size), draft.scale)
    hidden = torch.randn(3, head.trunk.config.hidden_size)
    logits = head.output.spread(head.output.logits(hidden))
    normed = head.trunk.ops.rms_norm(hidden, head.norm, head.trunk.config.rms_norm_eps)
    expected = normed @ rows.float().T
    ids = draft.ids.long()
    assert len(ids) == 1500
    assert (logits[:, ids] - expected).abs().max() < 1e-4 * expected.abs().max()
    others = torch.ones(logits.shape[1], dtype=torch.bool).index_fill(0, ids, False)
    assert bool((logits[:, others] == -torch.inf).all())
    sampler, rows_of = new_sampler_rows(2, logits.shape[1], "cpu"), torch.ones(3, dtype=torch.int32)
    for params in (GREEDY, HOT, STRICT):  # from the rows alone, and among all tokens
        sampler.configure_row(1, params, ())
        chosen = torch.zeros(2, 3, dtype=torch.int64)
        places, positions = new_ring(2, False), torch.arange(6, dtype=torch.int32).view(2, 3) % 3
        head.output.choose(hidden, sampler, rows_of, positions[0], chosen[0], places)
        head.trunk.ops.choose(logits, sampler, rows_of, positions[1], chosen[1], places)
        assert params is STRICT or torch.equal(chosen[0], chosen[1])
        assert torch.isin(chosen, ids).all()
        assert positions.tolist() == [[1, 2, 3]] * 2


@in_commands("exact-22-0.5")
@pytest.mark.parametrize(
    ("activations", "count", "accepted"), [("exact", 22, 0.5), ("int8", 12, 0.4)]
)
def test_a_draft_head_changes_nothing_and_is_right_nearly_as_often(
    small_draft: Path, activations: Activations, count: int, accepted: float
) -> None:
    options = lowbit.LoadOptions(device="cpu", context=400, activations=activations)
    plain, drafted = (lowbit.load(small_draft, options, speculate=mode) for mode in ("off", "mtp"))
    tally = Tally()
    for request in requests(plain, count):
        handle = drafted.engine.submit(request)
        assert handle.result() == plain.engine.submit(request).result()
        tally.add(handle.tally)
    assert tally.accepted[0] / tally.drafted[0] > accepted


def test_a_damaged_draft_head_is_refused_before_the_weights_are_read(
    small_draft: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(small_draft, folder)
    file = folder / "draft" / "head.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(FormatError, match=r"draft/head\.safetensors"):
        lowbit.load(folder, device="cpu", speculate="mtp")
    assert lowbit.load(folder, device="cpu", speculate="ngram").engine.decoder.mtp is None
