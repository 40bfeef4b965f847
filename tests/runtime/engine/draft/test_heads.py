"""Heads of block drafters: scores and drafts by plain torch, and answers without a trace."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.architectures import kind_of
from lowbit.formats.errors import FormatError, LowbitError
from lowbit.formats.kv_cache import FP32_CACHE
from lowbit.runtime.backends import cpu
from lowbit.runtime.engine.draft.block import Blocks
from lowbit.runtime.engine.memory import Account
from lowbit.runtime.engine.request import Request
from lowbit.runtime.models.block_head import Choice
from lowbit.runtime.models.draft_output import DraftOutput
from lowbit.runtime.models.loader import load_drafter, open_model, with_drafter
from lowbit.runtime.models.selected_rows import SelectedRows
from lowbit.runtime.state.device_state import CacheSize, kv_pages
from lowbit.runtime.state.host_rings import new_ring
from lowbit.runtime.state.sampler import new_sampler_rows
from lowbit.runtime.state.step_buffers import lone_step
from lowbit.runtime.weights.linear import DenseLinear
from tests.conversions import convert
from tests.drafters import (
    DFLASH2,
    DOMINO,
    DSPARK,
    LILICORR,
    XPRESS,
    context_by_torch,
    hidden_by_torch,
    text_model_of,
    write_drafter,
)
from tests.heads import DRAFTS, Block
from tests.lanes import in_commands
from tests.oracle import dequantized_weights
from tests.runtime.engine.draft.test_dspark import (
    FOR_TWO_LAYERS,
    HOT,
    STRICT,
    TARGET,
    always_drafting,
    load,
    noted_drafts,
    requests,
)
from tests.short_models import SHORT_VOCABULARY

EXAMPLES = Path(__file__).parents[4] / "examples"
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text()
GREEDY = lowbit.SamplingParams(logprobs=1)
UNSHIFTED = DOMINO["dflash_config"] | {"shift_label": False, "pure_draft_prefix_len": 0}
BASES: dict[str, dict[str, Any]] = {
    "dflash2": DFLASH2,
    "domino": DOMINO,
    "lilicorr": LILICORR,
    "xpress": XPRESS,
}
CONVOLVED = {"conv_kernel_size": 2, "conv_group_size": 16, "lilicorr_hidden_size": 0}
CAPPED = {"output_multiplier": 0.4, "final_logit_softcapping": 2.0, "conv_kernel_size": 3}
UNSHIFTED = {"shift_label": False, "pure_draft_prefix_len": 0}
VARIANTS = BASES | {
    "dflash2 capped": DFLASH2 | {"dflash_config": DFLASH2["dflash_config"] | CAPPED},
    "lilicorr convolved": LILICORR
    | {"dflash_config": LILICORR["dflash_config"] | CONVOLVED | {"lilicorr_num_heads": 4}},
    "domino unshifted": DOMINO | {"dflash_config": DOMINO["dflash_config"] | UNSHIFTED},
}
KINDS = pytest.mark.parametrize("kind", BASES)
KINDS_BY_DTYPE = [  # a head and the precision of its target: none of them needs every pair
    ("float32", "dflash2"),
    ("float32", "xpress"),
    ("int4", "domino"),
    ("int4", "lilicorr"),
]
ALL = pytest.mark.parametrize("kind", VARIANTS)
LAST = (5, 1000)  # tokens of two sequences


def for_two_layers(base: dict[str, Any]) -> dict[str, Any]:
    """The drafter's config for a target of two layers, of which it reads the first."""
    section = base["dflash_config"] | {"target_layer_ids": [0]}
    return base | {"num_target_layers": 2, "dflash_config": section}


def drafts_of(base: dict[str, Any], weights: dict[str, Tensor], block: Block) -> Any:
    return DRAFTS[kind_of(base)](base, weights, block)


@in_commands("xpress-True", "domino-False", "dflash2-True", "lilicorr-False")
@pytest.mark.parametrize(
    ("kind", "packed"), [*((kind, False) for kind in VARIANTS), *((kind, True) for kind in BASES)]
)
def test_scores_are_those_of_plain_torch(tmp_path: Path, kind: str, packed: bool) -> None:
    """Two blocks beside each other; the scores that drafts are the best of."""
    base = VARIANTS[kind]
    weights, folder = write_drafter(tmp_path / "source", base=base), tmp_path / "source"
    if packed:
        folder = tmp_path / "packed"
        convert(tmp_path / "source", folder, Recipe(group_size=32))
        weights = dequantized_weights(folder)
    drafter, _ = load_drafter(with_drafter(open_model(TARGET), folder), "cpu", torch.float32, 64)
    generator = torch.Generator().manual_seed(1)
    taps, *blocks = (
        torch.randn(n, h, generator=generator) for n, h in ((45, 512), *[(8, 256)] * 2)
    )
    head, embedding = (torch.randn(4096, 256, generator=generator) / scale for scale in (16, 1))
    pages = kv_pages(drafter.config, 4, FP32_CACHE, "cpu")
    context = drafter.read(taps, pages, lone_step(45, "cpu", 0))[-1:].expand(2, -1)
    step = lone_step(8, "cpu", 45, prompt=False)
    hidden = torch.stack([drafter.hidden(block, pages, step) for block in blocks])
    scores: list[Tensor] = []

    def choose(logits: Tensor, *others: Any) -> None:
        scores.append(logits)
        cpu.choose(logits, *others)

    ops: Any = SimpleNamespace(**{**vars(cpu), "choose": choose})
    output = DraftOutput(ops, drafter.norm, 1e-6, DenseLinear(head), 4096)
    k, rows = drafter.blocks.drafts, torch.tensor([1, 2], dtype=torch.int32)
    places = torch.arange(45, 45 + k, dtype=torch.int32).expand(2, -1)
    last, sampler = torch.tensor(LAST), new_sampler_rows(3, 4096, "cpu")
    sampling = sampler, rows, places, last, new_ring(3, False)
    choice: Any = Choice(ops, output, embedding, *sampling, context)
    assert drafter.head is not None
    drafts = drafter.head.draft(hidden, choice)
    found = scores[-1].view(2, k, -1) if len(scores[-1]) > 2 else torch.stack(scores[-k:], dim=1)
    for row, block in enumerate(blocks):
        normed = hidden_by_torch(base, weights, taps, block)
        before = context_by_torch(base, weights, taps[-1])
        made = Block(normed, LAST[row], head, embedding, before)
        tokens, wanted = drafts_of(base, weights, made)
        assert drafts[row].tolist() == tokens
        assert tokens != (normed @ head.T).argmax(-1)[drafter.blocks.first :].tolist()
        seen = wanted > -torch.inf
        assert torch.equal(found[row] > -torch.inf, seen)
        assert (found[row] - wanted)[seen].abs().max() < 2e-5 * wanted[seen].abs().max()


def test_passes_with_a_temperature_settle(tmp_path: Path) -> None:
    """Drafts drawn together, all of them, are those drawn one by one; fewer need not be."""
    found = []
    generator = torch.Generator().manual_seed(3)
    shapes = (2, 8, 256), (4096, 256), (4096, 256)
    hidden, head, embedding = (torch.randn(shape, generator=generator) for shape in shapes)
    head /= 16
    for passes in (1, 7, 8):
        folder = tmp_path / str(passes)
        write_drafter(folder, base=XPRESS, xpress_num_passes=passes)
        opened = with_drafter(open_model(TARGET), folder)
        drafter, _ = load_drafter(opened, "cpu", torch.float32, 64)
        sampler = new_sampler_rows(3, 4096, "cpu")
        for row in (1, 2):
            sampler.configure_row(row, lowbit.SamplingParams(0.8, top_k=20, seed=row), ())
        places = torch.arange(45, 52, dtype=torch.int32).expand(2, -1)
        rows, ops = torch.tensor([1, 2], dtype=torch.int32), cpu
        output: Any = DraftOutput(ops, drafter.norm, 1e-6, DenseLinear(head), 4096)
        sampling = sampler, rows, places, torch.tensor(LAST), new_ring(3, False)
        choice: Any = Choice(ops, output, embedding, *sampling)
        assert drafter.head is not None
        found.append(drafter.head.draft(hidden, choice).tolist())
    assert found[1] == found[2]
    assert found[0] != found[1]


@pytest.fixture(scope="module")
def target(short_hybrid: Path) -> Any:
    """The target by transformers, in FP32."""
    return text_model_of(short_hybrid)


@torch.no_grad()
def drafts_by_torch(
    target: Any, base: dict[str, Any], weights: dict[str, Tensor], ids: list[int], off: int = 0
) -> list[int]:
    """The drafts behind a text: outputs of the target by transformers, the rest by torch.

    off: layers by which the outputs of the target are wrong.
    """
    states = target.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    section = base["dflash_config"]
    taps = torch.cat([states[layer + 1 + off][0] for layer in section["target_layer_ids"]], dim=1)
    size, mask = 8, section["mask_token_id"]
    embedding, head = target.model.embed_tokens.weight, target.lm_head.weight
    block = embedding[torch.tensor([ids[-1], *[mask] * (size - 1)])]
    normed = hidden_by_torch(base, weights, taps, block)
    context = context_by_torch(base, weights, taps[-1])
    tokens, _ = drafts_of(base, weights, Block(normed, ids[-1], head, embedding, context))
    return list(tokens)


@in_commands("lilicorr", "dflash2", "domino*", "lilicorr convolved", "dflash2 capped")
@ALL
def test_drafts_are_those_of_plain_torch(
    tmp_path: Path, short_hybrid: Path, target: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Two sequences, and one behind a prefix of the cache; not by outputs one layer off."""
    base = for_two_layers(VARIANTS[kind])
    weights = write_drafter(tmp_path, base=base)
    model = always_drafting(load(tmp_path, short_hybrid, draft_tokens=7))
    made = noted_drafts(monkeypatch)
    prompts = [model.tokenizer.encode(TEXT[:some], framed=True, context=400) for some in (800, 30)]
    handles = [model.engine.submit(Request(tuple(ids), GREEDY, 11)) for ids in prompts]
    texts = [[*ids, *handle.result()] for ids, handle in zip(prompts, handles, strict=True)]
    turn = model.engine.submit(Request((*texts[0], 9, 8), GREEDY, 4))
    turn.result()
    assert turn.reused > 128
    assert {len(drafts) for _, drafts in made} > {6, 7}
    for ids, drafts in [*made[:4], *made[-2:]]:
        assert drafts == drafts_by_torch(target, base, weights, ids)[: len(drafts)]
    ids, drafts = made[0]
    assert drafts != drafts_by_torch(target, base, weights, ids, off=-1)[: len(drafts)]
    section = base["dflash_config"]
    shift = {"shift_label": not section.get("shift_label", False)}
    if kind.startswith("domino"):  # outputs one place on
        other = base | {"dflash_config": section | shift}
        assert drafts != drafts_by_torch(target, other, weights, ids)[: len(drafts)]


INT4: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": "int4", "kv_cache": "int8"}


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest, short_hybrid: Path) -> lowbit.Model:
    """The target without a drafter."""
    return load(None, short_hybrid, **(INT4 if request.param == "int4" else {}))


@in_commands("int4-domino", "float32-dflash2", "float32-xpress")
@pytest.mark.parametrize(("plain", "kind"), KINDS_BY_DTYPE, indirect=["plain"])
def test_drafts_change_nothing(
    tmp_path: Path, short_hybrid: Path, kind: str, plain: lowbit.Model
) -> None:
    """Greedy, sampled and penalized, alone, in the next turn, and together."""
    plain.engine.forget()
    expected = [plain.engine.submit(request) for request in requests(plain, 5)]
    answers = [handle.result() for handle in expected]
    write_drafter(tmp_path, base=for_two_layers(BASES[kind]))
    options = INT4 if plain.dtype == torch.bfloat16 else {}
    drafted = always_drafting(load(tmp_path, short_hybrid, **options))
    for request, handle, answer in zip(requests(drafted, 5), expected, answers, strict=True):
        found = drafted.engine.submit(request)
        assert found.result() == answer
        assert found.log_probabilities == handle.log_probabilities
        assert found.tally.rounds > 1
        turn = replace(request, prompt=(*request.prompt, *answer, 9, 8), max_new_tokens=3)
        assert drafted.engine.submit(turn).result() == plain.engine.submit(turn).result()
    drafted.engine.forget()
    together = [drafted.engine.submit(request) for request in requests(drafted, 5)]
    assert [each.result() for each in together] == answers


@pytest.fixture(scope="module")
def with_rows(tmp_path_factory: pytest.TempPathFactory, short_hybrid: Path) -> Path:
    """The target with a draft head of 500 rows."""
    folder = tmp_path_factory.mktemp("target")
    convert(short_hybrid, folder, Recipe(base="int4", draft_vocabulary=500))
    return folder


@in_commands("dflash2", "domino", "lilicorr")
@KINDS
def test_drafts_are_chosen_from_the_rows_of_a_draft_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, with_rows: Path
) -> None:
    write_drafter(tmp_path, base=for_two_layers(BASES[kind]))
    drafted, made = load(tmp_path, with_rows, dtype=torch.bfloat16), noted_drafts(monkeypatch)
    for request in requests(drafted, 6):
        drafted.engine.submit(request).result()
    blocks = drafted.engine.runner.blocks
    assert isinstance(blocks, Blocks)
    assert blocks.rows is not None
    found = {id for _, drafts in made for id in drafts}
    assert len(found) > 5
    assert found <= {*blocks.rows.ids.tolist()}


class Spread(DraftOutput[Any]):
    """Chooses among all tokens, of which those without a row have logits of -inf."""

    def logits(self, hidden: Tensor) -> Tensor:
        ids, head = self.head
        wide = torch.full((len(hidden), self.vocabulary), -torch.inf)
        product = self.ops.product(hidden, head, norm=self.norm, eps=self.eps, logits=True)
        return wide.index_copy_(1, ids, product)


def choice_of(output: Any, drafter: Any, params: lowbit.SamplingParams) -> Any:
    """The `Choice` of all drafts of two blocks."""
    generator = torch.Generator().manual_seed(3)
    embedding, context = (torch.randn(n, 256, generator=generator) for n in (SHORT_VOCABULARY, 2))
    sampler, k = new_sampler_rows(3, SHORT_VOCABULARY, "cpu"), drafter.blocks.drafts
    for row in (1, 2):
        sampler.configure_row(row, replace(params, seed=row), (7, 9))
    places = torch.arange(45, 45 + k, dtype=torch.int32).expand(2, -1)
    on = torch.tensor([1, 2], dtype=torch.int32), places, torch.tensor(LAST)
    return Choice(cpu, output, embedding, sampler, *on, new_ring(3, False), context)


@in_commands(
    "penalized-lilicorr",
    "drawn-xpress",
    "drawn-dspark",
    "greedy-dflash2",
    "penalized-domino",
    "greedy-lilicorr",
    "penalized-dspark",
)
@pytest.mark.parametrize("kind", [*BASES, "dspark"])
@pytest.mark.parametrize("params", [GREEDY, HOT, STRICT], ids=["greedy", "drawn", "penalized"])
def test_a_head_that_keeps_rows_drafts_as_a_whole_one(
    tmp_path: Path, kind: str, params: lowbit.SamplingParams, with_rows: Path
) -> None:
    """Its linear over the vocabulary has the rows of the draft head alone."""
    base = DSPARK | FOR_TWO_LAYERS if kind == "dspark" else for_two_layers(BASES[kind])
    write_drafter(tmp_path, base=base)
    opened = with_drafter(open_model(with_rows), tmp_path)
    drafter, rows = load_drafter(opened, "cpu", torch.float32, 64)
    assert opened.drafter is not None
    assert rows is not None
    uncut = replace(opened, draft=None, drafter=replace(opened.drafter, head_rows=None))
    whole, _ = load_drafter(uncut, "cpu", torch.float32, 64)
    head, over_all = drafter.head, whole.head
    assert head is not None
    assert over_all is not None
    for each, count in ((head, 500), (over_all, SHORT_VOCABULARY)):
        if (linear := getattr(each, "output", None)) is not None:
            assert cpu.product(torch.zeros(1, linear.K), linear).shape == (1, count)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(2, drafter.blocks.size, 256, generator=generator)
    output: Any = DraftOutput(cpu, drafter.norm, 1e-6, None, SHORT_VOCABULARY, rows)
    spread = Spread(cpu, drafter.norm, 1e-6, (rows.ids, rows.head), SHORT_VOCABULARY)
    found = head.draft(hidden, choice_of(output, drafter, params))
    assert torch.equal(found, over_all.draft(hidden, choice_of(spread, drafter, params)))
    assert torch.isin(found, rows.ids).all()


@pytest.mark.parametrize("kind", ["lilicorr", "dflash2"])
def test_fewer_rows_than_a_head_has_candidates(tmp_path: Path, kind: str, with_rows: Path) -> None:
    write_drafter(tmp_path, base=for_two_layers(BASES[kind]))
    opened = with_drafter(open_model(with_rows), tmp_path)
    drafter, rows = load_drafter(opened, "cpu", torch.float32, 64)
    assert drafter.head is not None
    assert rows is not None
    few: Any = SelectedRows(rows.ids[-5:], DenseLinear(torch.randn(5, 256)))
    output: Any = DraftOutput(cpu, drafter.norm, 1e-6, None, SHORT_VOCABULARY, few)
    for params in (GREEDY, HOT, STRICT):
        hidden = torch.randn(2, drafter.blocks.size, 256)
        found = drafter.head.draft(hidden, choice_of(output, drafter, params))
        assert torch.isin(found, few.ids).all()


def test_rows_that_a_head_leaves_out_take_no_memory(
    tmp_path: Path, short_hybrid: Path, with_rows: Path
) -> None:
    write_drafter(tmp_path, base=for_two_layers(XPRESS))
    sizes = []
    for folder in (short_hybrid, with_rows):
        drafter = with_drafter(open_model(folder), tmp_path).drafter
        assert drafter is not None
        sizes.append(drafter.weight_bytes("cpu", torch.float32))
    assert sizes[0] - sizes[1] == 4 * (SHORT_VOCABULARY - 500) * XPRESS["xpress_rank"]


def test_a_kept_context_takes_memory(tmp_path: Path) -> None:
    """A head that reads it has that of the last positions of each row; its ring is counted."""
    write_drafter(tmp_path, base=LILICORR)
    blocks = load(tmp_path).engine.runner.blocks
    assert isinstance(blocks, Blocks)
    assert blocks.contexts is not None
    size = CacheSize(400, 8, 4, 4)
    both, alone = (
        Account(opened, "cpu", torch.float32, FP32_CACHE, 4096).row_bytes(size)
        for opened in (with_drafter(open_model(TARGET), tmp_path), open_model(TARGET))
    )
    assert both - alone == blocks.contexts.nbytes


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("xpress", "xpress_head.mix.L"),
        ("domino", "prefix_gru.weight_hh_l0"),
        ("dflash2", "layers.1.mlp_conv.base_kernel"),
        ("lilicorr", "lilicorr.slot_embedding"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path: Path, kind: str, tensor: str) -> None:
    """Tensors of heads that hold NaN, or have another shape than config.json says."""
    write_drafter(tmp_path, base=BASES[kind])
    weights = load_file(tmp_path / "model.safetensors")
    spoiled = weights[tensor].clone()
    spoiled.view(-1)[5] = float("nan")
    save_file({**weights, tensor: spoiled}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=rf"`{tensor}` holds NaN or Inf"):
        load(tmp_path)
    save_file({**weights, tensor: spoiled.view(-1)[:32].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=rf"`{tensor}`: expected shape"):
        load(tmp_path)
    del weights[tensor]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(LowbitError, match=tensor):
        load(tmp_path)
