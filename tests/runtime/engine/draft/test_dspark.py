"""DSpark drafters: their drafts by plain torch, and answers that are those without drafts."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Recipe
from lowbit.formats.errors import FormatError, UnsupportedModelError
from lowbit.formats.kv_cache import FP32_CACHE
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks
from lowbit.runtime.engine.draft.source import Drafts
from lowbit.runtime.engine.request import Request
from lowbit.runtime.models import dspark
from lowbit.runtime.models.loader import load_drafter, open_model, with_drafter
from lowbit.runtime.state.device_state import kv_pages
from lowbit.runtime.state.step_buffers import lone_step
from tests.conversions import convert
from tests.drafters import DSPARK, hidden_by_torch, text_model_of, write_drafter
from tests.oracle import dequantized_weights
from tests.runtime.engine.draft.guesses import costs_by_tokens

EXAMPLES = Path(__file__).parents[4] / "examples"
TARGET = EXAMPLES / "models" / "tiny-qwen3.5"
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text()
START = "Once upon a time, a little robot"
GREEDY = lowbit.SamplingParams(logprobs=1)
HOT = lowbit.SamplingParams(0.8, top_k=20, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.7, presence_penalty=0.5, frequency_penalty=0.2, seed=4)
MASK = DSPARK["mask_token_id"]
FOR_TWO_LAYERS: dict[str, Any] = {"num_target_layers": 2, "target_layer_ids": [0]}


def load(drafter: Path | None, target: Path = TARGET, **options: Any) -> lowbit.Model:
    options = {"dtype": torch.float32, "context": 400, "max_sequences": 8, **options}
    mode: Any = "off" if drafter is None else "dflash"
    return lowbit.load(target, device="cpu", speculate=mode, drafter=drafter, **options)


def bias_by_torch(weights: dict[str, Tensor], id: int) -> Tensor:
    """Bias [V] of the logits behind a token, in plain FP32."""
    first, second = (weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    return second @ first[id]


@pytest.mark.parametrize("packed", [False, True], ids=["stored", "packed"])
def test_logits_are_those_of_plain_torch(tmp_path: Path, packed: bool) -> None:
    weights, folder = write_drafter(tmp_path / "source", base=DSPARK), tmp_path / "source"
    if packed:
        folder = tmp_path / "packed"
        convert(tmp_path / "source", folder, Recipe(group_size=32))
        weights = dequantized_weights(folder)
    drafter, _ = load_drafter(with_drafter(open_model(TARGET), folder), "cpu", torch.float32, 64)
    generator = torch.Generator().manual_seed(1)
    hidden_taps, block = (torch.randn(n, h, generator=generator) for n, h in ((45, 512), (7, 256)))
    pages = kv_pages(drafter.config, 4, FP32_CACHE, "cpu")
    drafter.read(hidden_taps, pages, lone_step(45, "cpu", 0))
    found = drafter.hidden(block, pages, lone_step(7, "cpu", 45, prompt=False))
    normed = drafter.ops.rms_norm(found, drafter.norm, 1e-6)
    expected = hidden_by_torch(DSPARK, weights, hidden_taps, block)
    assert (normed - expected).abs().max() < 2e-5 * expected.abs().max()
    assert isinstance(drafter.head, dspark.Markov)
    biases = drafter.head.bias(torch.tensor([5, 4095, 7]))
    wanted = torch.stack([bias_by_torch(weights, id) for id in (5, 4095, 7)])
    assert (biases - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.fixture(scope="module")
def target() -> Any:
    """The target by transformers, in FP32."""
    return text_model_of(TARGET)


@torch.no_grad()
def drafts_by_torch(
    target: Any, weights: dict[str, Tensor], ids: list[int], off: int = 0
) -> list[int]:
    """The drafts behind a text: outputs of the target by transformers, the rest by torch.

    off: layers by which the outputs of the target are wrong.
    """
    states = target.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    taps = [states[layer + 1 + off][0] for layer in DSPARK["target_layer_ids"]]
    block = target.model.embed_tokens(torch.tensor([ids[-1], *[MASK] * 6]))
    logits = target.lm_head(hidden_by_torch(DSPARK, weights, torch.cat(taps, dim=1), block))
    drafts, before = [], ids[-1]
    for each in logits:
        before = int((each + bias_by_torch(weights, before)).argmax())
        drafts.append(before)
    return drafts


def always_drafting(model: lowbit.Model) -> lowbit.Model:
    """Always with as many drafts as there may be."""
    assert isinstance(model.engine.drafting, Drafts)
    model.engine.drafting.policy.costs = costs_by_tokens(0.0, 0.0)
    return model


def noted_drafts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int]]]:
    """Takes all drafts of all rounds, each with the text before them."""
    made: list[tuple[list[int], list[int]]] = []
    draft = BlockRounds.draft

    def noted(rounds: BlockRounds, B: int, k: int, max_kv_len: int) -> Tensor:
        found = draft(rounds, B, k, max_kv_len)
        sequences = [part.sequence for part in rounds.parts]
        texts = [[*each.request.prompt, *each.output] for each in sequences]
        made.extend(zip(texts, found.tolist(), strict=True))
        return found

    monkeypatch.setattr(BlockRounds, "draft", noted)
    return made


def test_drafts_are_those_of_plain_torch(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as a block has tokens; two sequences, and one behind a prefix of the cache."""
    weights = write_drafter(tmp_path, base=DSPARK)
    model, made = always_drafting(load(tmp_path, draft_tokens=7)), noted_drafts(monkeypatch)
    prompts = [model.tokenizer.encode(TEXT[:some], framed=True, context=400) for some in (400, 30)]
    handles = [model.engine.submit(Request(tuple(ids), GREEDY, 11)) for ids in prompts]
    texts = [[*ids, *handle.result()] for ids, handle in zip(prompts, handles, strict=True)]
    turn = model.engine.submit(Request((*texts[0], 9, 8), GREEDY, 4))
    turn.result()
    assert turn.reused > 64
    assert {len(drafts) for _, drafts in made} > {6, 7}
    for ids, drafts in [*made[:4], *made[-2:]]:
        assert drafts == drafts_by_torch(target, weights, ids)[: len(drafts)]
    ids, drafts = made[0]
    assert drafts != drafts_by_torch(target, weights, ids, off=-1)[: len(drafts)]
    unbiased = {**weights, "markov_head.markov_w2.weight": torch.zeros(4096, 64)}
    assert drafts != drafts_by_torch(target, unbiased, ids)[: len(drafts)]


def write_pairs(folder: Path, tokens: tuple[int, ...]) -> None:
    """A drafter whose bias says which token stands behind each of a text."""
    write_drafter(folder, base=DSPARK)
    weights = load_file(folder / "model.safetensors")
    first, second = (weights[f"markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    first.zero_()
    second.zero_()
    distinct = list(dict.fromkeys(tokens))[:64]
    for place, token in enumerate(distinct):
        second[token, place] = 1
    for before, token in pairwise(tokens):
        if token in distinct:
            first[before] = torch.eye(64)[distinct.index(token)] * 500
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def requests(model: lowbit.Model, count: int = 12) -> list[Request]:
    params = (GREEDY, HOT, STRICT)
    texts = (START, TEXT[:700], "Lily")
    ids = [model.tokenizer.encode(text, framed=True, context=400) for text in texts]
    return [Request(tuple(some), each, count) for some, each in zip(ids, params, strict=True)]


@pytest.mark.commands  # `test_block_rounds` has rounds of its kind
def test_drafts_change_nothing(tmp_path: Path) -> None:
    """Greedy, sampled and penalized, alone and together, of a drafter that is often right.

    `test_block_rounds` has rounds in FP32.
    """
    options: dict[str, Any] = {"dtype": torch.bfloat16, "quantize": "int4", "kv_cache": "int8"}
    plain = load(None, **options)
    expected = [plain.engine.submit(request) for request in requests(plain)]
    answers = [handle.result() for handle in expected]
    write_pairs(tmp_path, answers[0])
    drafted = always_drafting(load(tmp_path, **options))
    handles = []
    for request, handle, answer in zip(requests(drafted), expected, answers, strict=True):
        handles.append(drafted.engine.submit(request))
        assert handles[-1].result() == answer
        assert handles[-1].log_probabilities == handle.log_probabilities
        turn = replace(request, prompt=(*request.prompt, *answer, 9, 8), max_new_tokens=4)
        assert drafted.engine.submit(turn).result() == plain.engine.submit(turn).result()
    assert all(handle.tally.rounds > 1 for handle in handles)
    found = handles[0].speculation
    assert found is not None
    assert found.tokens_a_round is not None
    assert found.tokens_a_round > 2.5  # the first draft is the one behind the last token
    drafted.engine.forget()
    together = [drafted.engine.submit(request) for request in requests(drafted)]
    assert [each.result() for each in together] == answers


@pytest.mark.commands  # `test_heads` has it of a head
def test_drafts_are_chosen_from_the_rows_of_a_draft_head(
    tmp_path: Path, short_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biased too; answers are those without drafts."""
    convert(short_hybrid, tmp_path / "target", Recipe(base="int4", draft_vocabulary=500))
    write_drafter(tmp_path / "drafter", base=DSPARK, **FOR_TWO_LAYERS)
    plain = load(None, tmp_path / "target", dtype=torch.bfloat16)
    drafted = load(tmp_path / "drafter", tmp_path / "target", dtype=torch.bfloat16)
    made = noted_drafts(monkeypatch)
    for request in requests(plain, 6):
        answer = plain.engine.submit(request).result()
        assert drafted.engine.submit(request).result() == answer
    blocks = drafted.engine.runner.blocks
    assert isinstance(blocks, Blocks)
    assert blocks.rows is not None
    found = {id for _, drafts in made for id in drafts}
    assert len(found) > 5
    assert found <= {*blocks.rows.ids.tolist()}


def test_a_drafter_without_the_bias_drafts_too(tmp_path: Path, short_hybrid: Path) -> None:
    less: dict[str, Any] = {
        **FOR_TWO_LAYERS,
        "markov_rank": 0,
        "markov_head_type": None,
        "enable_confidence_head": False,
    }
    write_drafter(tmp_path, base=DSPARK, **less)
    plain, drafted = load(None, short_hybrid), load(tmp_path, short_hybrid)
    request = requests(plain, 6)[0]
    handle = drafted.engine.submit(request)
    assert handle.result() == plain.engine.submit(request).result()
    assert handle.tally.rounds


def test_copies_of_the_targets_tensors_take_no_memory(tmp_path: Path) -> None:
    write_drafter(tmp_path, base=DSPARK)
    bare, dtype = open_model(TARGET), torch.float32
    both = with_drafter(bare, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    copies = ("embed_tokens", "lm_head", "confidence_head")
    own = [name for name in tensors if not name.startswith(copies)]
    twice = [name for name in own if "k_proj" in name or "v_proj" in name]
    beside = sum(4 * tensors[name].numel() for name in (*own, *twice))
    assert both.weight_bytes("cpu", dtype) - bare.weight_bytes("cpu", dtype) == beside


@pytest.mark.parametrize("name", ["w1", "w2"])
def test_damaged_tensors_are_refused(tmp_path: Path, name: str) -> None:
    """Tensors that hold NaN, or have another shape than config.json says."""
    tensor = f"markov_head.markov_{name}.weight"
    write_drafter(tmp_path, base=DSPARK)
    weights = load_file(tmp_path / "model.safetensors")
    spoiled = weights[tensor].clone()
    spoiled[7, 3] = float("nan")
    save_file({**weights, tensor: spoiled}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=rf"`{tensor}` holds NaN or Inf"):
        load(tmp_path)
    short = weights[tensor][:, :32].contiguous()
    save_file({**weights, tensor: short}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=rf"`{tensor}`: expected shape"):
        load(tmp_path)


def test_drafters_for_other_models_are_refused(tmp_path: Path) -> None:
    write_drafter(tmp_path / "a", base=DSPARK, target_layer_ids=[0, 3])
    with pytest.raises(UnsupportedModelError, match="reads layer 3, the model has layers up to 2"):
        load(tmp_path / "a")
    write_drafter(tmp_path / "dflash", base=DSPARK, architectures=["DFlash3DraftModel"])
    with pytest.raises(UnsupportedModelError, match="class `DFlash3DraftModel` is not supported"):
        load(tmp_path / "dflash")
