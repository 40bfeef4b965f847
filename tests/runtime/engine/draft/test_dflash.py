"""Drafters of blocks: their hidden states by plain torch, what they draft, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import lowbit.runtime as lowbit
from lowbit.convert import Override, Recipe
from lowbit.formats.errors import CheckpointError, FormatError, LowbitError, UnsupportedModelError
from lowbit.formats.kv_cache import BF16_CACHE, FP32_CACHE
from lowbit.runtime.cli.main import main
from lowbit.runtime.engine.draft.block import BlockRounds, Blocks
from lowbit.runtime.engine.load_options import Mode
from lowbit.runtime.engine.memory import Account
from lowbit.runtime.engine.plan import MOST_CHUNK
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from lowbit.runtime.models.loader import load_drafter, open_model, with_drafter
from lowbit.runtime.state.device_state import CacheSize, kv_pages
from lowbit.runtime.state.step_buffers import lone_step
from tests.conversions import convert
from tests.drafters import CONFIG, hidden_by_torch, text_model_of, write_drafter
from tests.lanes import in_commands
from tests.oracle import dequantized_weights

EXAMPLES = Path(__file__).parents[4] / "examples"
TARGET, TRAINED = (EXAMPLES / "models" / name for name in ("tiny-qwen3.5", "tiny-qwen3.5-dflash"))
TEXT = (EXAMPLES / "data" / "stories-eval.txt").read_text()
EIGHT = (Override("layers.1.*", 8),)
GREEDY = lowbit.SamplingParams(logprobs=1)
HOT = lowbit.SamplingParams(0.8, top_k=20, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.7, presence_penalty=0.5, frequency_penalty=0.2, seed=4)


def load(drafter: Path | None, mode: Mode = "dflash", **options: Any) -> lowbit.Model:
    options = {"dtype": torch.float32, "context": 400, "max_sequences": 8, **options}
    return lowbit.load(
        TARGET,
        device="cpu",
        speculate="off" if drafter is None else mode,
        drafter=drafter,
        **options,
    )


@pytest.mark.parametrize("packed", [None, (), EIGHT], ids=["stored", "packed", "of two schemes"])
@pytest.mark.parametrize("parts", [(45,), (30, 1, 1, 5, 8)])
def test_hidden_states_are_those_of_plain_torch(
    tmp_path: Path, packed: tuple[Override, ...] | None, parts: tuple[int, ...]
) -> None:
    """Behind a context that came in parts, beyond the window of the first layer."""
    weights, folder = write_drafter(tmp_path / "source"), tmp_path / "source"
    if packed is not None:
        folder = tmp_path / "packed"
        convert(tmp_path / "source", folder, Recipe(group_size=32, overrides=packed))
        weights = dequantized_weights(folder)
    opened = with_drafter(open_model(TARGET), folder)
    drafter, rows = load_drafter(opened, "cpu", torch.float32, 64)
    assert len(drafter.contexts) == (2 if packed else 1)
    assert rows is None
    generator = torch.Generator().manual_seed(1)
    hidden_taps, block = (torch.randn(n, h, generator=generator) for n, h in ((45, 512), (8, 256)))
    pages = kv_pages(drafter.config, 4, FP32_CACHE, "cpu")
    first = 0
    for count in parts:
        step = lone_step(count, "cpu", first, prompt=count > 16)
        drafter.read(hidden_taps[first : first + count], pages, step)
        first += count
    before = pages.k.clone()
    found = drafter.hidden(block, pages, lone_step(8, "cpu", 45, prompt=False))
    assert torch.equal(pages.k, before)  # a block leaves nothing
    expected = hidden_by_torch(CONFIG, weights, hidden_taps, block)
    normed = drafter.ops.rms_norm(found, drafter.norm, 1e-6)
    assert (normed - expected).abs().max() < 2e-5 * expected.abs().max()


@pytest.fixture(scope="module")
def target() -> Any:
    """The target by transformers, in FP32."""
    return text_model_of(TARGET)


@torch.no_grad()
def drafts_by_torch(target: Any, weights: dict[str, Tensor], ids: list[int]) -> list[int]:
    """The block behind a text: outputs of the target by transformers, the rest by torch."""
    states = target.model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    layers = CONFIG["dflash_config"]["target_layer_ids"]
    hidden_taps = torch.cat([states[layer + 1][0] for layer in layers], dim=1)
    block = target.model.embed_tokens(torch.tensor([ids[-1], *[1000] * 7]))
    hidden = hidden_by_torch(CONFIG, weights, hidden_taps, block)
    return [int(id) for id in target.lm_head(hidden)[1:].argmax(-1)]


def test_drafts_are_those_of_plain_torch(
    tmp_path: Path, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While sequences decode together, and behind a prefix that the cache holds."""
    weights = write_drafter(tmp_path)
    model = load(tmp_path, draft_tokens=5)
    made: list[tuple[list[int], list[int]]] = []
    draft = BlockRounds.draft

    def noted(rounds: BlockRounds, B: int, k: int, max_kv_len: int) -> Tensor:
        found = draft(rounds, B, k, max_kv_len)
        sequences = [part.sequence for part in rounds.parts]
        texts = [[*each.request.prompt, *each.output] for each in sequences]
        made.extend(zip(texts, found.tolist(), strict=True))
        return found

    monkeypatch.setattr(BlockRounds, "draft", noted)
    prompts = [model.tokenizer.encode(TEXT[:some], framed=True, context=400) for some in (400, 30)]
    handles = [model.engine.submit(Request(tuple(ids), GREEDY, 6)) for ids in prompts]
    texts = [[*ids, *handle.result()] for ids, handle in zip(prompts, handles, strict=True)]
    turn = model.engine.submit(Request((*texts[0], 9, 8), GREEDY, 5))
    turn.result()
    assert turn.reused > 64
    assert len(made) > 6
    for ids, drafts in [*made[:4], *made[-3:]]:
        assert drafts == drafts_by_torch(target, weights, ids)[: len(drafts)]


@pytest.fixture(
    scope="module",
    params=[("float32", "bf16"), ("bfloat16", "int8")],
    ids="-".join,
)
def models(request: pytest.FixtureRequest) -> dict[str, lowbit.Model]:
    """The target with the bundled drafter, by what drafts."""
    dtype, kv_cache = getattr(torch, request.param[0]), request.param[1]
    quantize = None if dtype == torch.float32 else "int4"
    modes: tuple[Mode, ...] = ("dflash", "auto") if quantize is None else ("dflash",)
    drafted: dict[str, lowbit.Model] = {
        each: load(TRAINED, each, dtype=dtype, quantize=quantize, kv_cache=kv_cache)
        for each in modes
    }
    return {"off": load(None, dtype=dtype, quantize=quantize, kv_cache=kv_cache), **drafted}


def requests(model: lowbit.Model, count: int = 9) -> list[Request]:
    starts = ("Once upon a time, a little robot", TEXT[:700], "Lily")
    params = (GREEDY, HOT, STRICT)
    ids = [model.tokenizer.encode(start, framed=True, context=400) for start in starts]
    return [Request(tuple(some), each, count) for some, each in zip(ids, params, strict=True)]


@in_commands("bfloat16-int8")
def test_drafts_change_nothing(models: dict[str, lowbit.Model]) -> None:
    """Greedy, sampled and penalized, alone, in the next turn, and all together."""
    plain = models["off"].engine
    plain.forget()
    alone, turns = [], []
    for request in requests(models["off"]):
        alone.append(plain.submit(request))
        turn = replace(request, prompt=(*request.prompt, *alone[-1].result(), 9, 8))
        turns.append(plain.submit(replace(turn, max_new_tokens=5)))
        turns[-1].result()
    for mode, model in models.items():
        if mode != "off":
            assert_same(model, mode, alone, turns)


def assert_same(model: lowbit.Model, mode: str, alone: list[Handle], turns: list[Handle]) -> None:
    """What a model with drafts answers is what one without has answered."""
    drafted, rounds = model.engine, 0
    drafted.forget()
    for request, expected, turn in zip(requests(model), alone, turns, strict=True):
        found = drafted.submit(request)
        assert found.result() == expected.result()
        assert found.log_probabilities == expected.log_probabilities
        rounds += found.tally.rounds
        later = replace(request, prompt=(*request.prompt, *found.result(), 9, 8), max_new_tokens=5)
        again = drafted.submit(later)
        assert again.result() == turn.result()
        assert again.reused
    assert rounds > 6 or mode == "auto"  # which measures whether drafts pay
    drafted.forget()
    together = [drafted.submit(request) for request in requests(model)]
    assert [each.result() for each in together] == [each.result() for each in alone]


@in_commands("float32-bf16")
def test_a_trained_drafter_gives_several_tokens_a_round(models: dict[str, lowbit.Model]) -> None:
    model = models["dflash"]
    ids = model.tokenizer.encode("Once upon a time", framed=True, context=400)
    handle = model.engine.submit(Request(tuple(ids), GREEDY, 50))
    handle.result()
    assert handle.speculation is not None
    assert handle.speculation.tokens_a_round is not None
    assert handle.speculation.tokens_a_round > 1.8
    assert len(handle.speculation.drafted) >= 4  # of 7, by what steps take here


def test_a_drafter_takes_memory(models: dict[str, lowbit.Model]) -> None:
    """Keys and values of a layer are multiplied for the context too, from rows of their own."""
    plain, drafted = models["off"].opened, models["dflash"].opened
    assert drafted.drafter is not None
    dtype = models["off"].dtype
    tensors = drafted.drafter.checkpoint.tensors
    twice = [info for name, info in tensors.items() if "k_proj" in name or "v_proj" in name]
    beside = sum(info.nbytes for info in (*tensors.values(), *twice))
    assert drafted.weight_bytes("cpu", dtype) == plain.weight_bytes("cpu", dtype) + (
        beside * dtype.itemsize // 2
    )
    blocks = models["dflash"].engine.runner.blocks
    assert blocks is not None
    both, alone = (
        Account(opened, "cpu", dtype, models["off"].kv_cache.cache_type, 4096).page_bytes(
            blocks.pages.count
        )
        for opened in (drafted, plain)
    )
    assert both - alone == blocks.pages.size_bytes


def test_a_drafter_takes_memory_of_a_gpu_for_what_it_reads(tmp_path: Path) -> None:
    """Outputs of two layers of a chunk, apart and side by side."""
    write_drafter(tmp_path)
    target = open_model(TARGET)
    both, alone = (
        Account(opened, "cuda", torch.bfloat16, BF16_CACHE, 4096)
        for opened in (with_drafter(target, tmp_path), target)
    )
    assert (both.drafter_bytes(), alone.drafter_bytes()) == (2 * MOST_CHUNK * 2 * 256 * 2, 0)
    size = CacheSize(400, 1, 4, 4)
    taken = [account.needed(size, 4) for account in (both, alone)]
    pages = kv_pages(both.opened.drafter.config, 4, BF16_CACHE, "meta")  # type: ignore[union-attr]
    weights = sum(
        opened.weight_bytes("cuda", torch.bfloat16) * sign
        for opened, sign in ((both.opened, 1), (target, -1))
    )
    assert taken[0] - taken[1] == both.drafter_bytes() + pages.size_bytes + weights


@pytest.mark.commands  # `test_heads` has it of a head
def test_drafts_are_chosen_from_the_rows_of_a_draft_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's draft head, whose own head is not read; answers are those without drafts."""
    convert(TARGET, tmp_path, Recipe(base="int4", draft_vocabulary=500))
    options = lowbit.LoadOptions(device="cpu", context=400)
    plain = lowbit.load(tmp_path, options)
    drafted = lowbit.load(tmp_path, options, speculate="dflash", drafter=TRAINED)
    blocks, made = drafted.engine.runner.blocks, []
    assert isinstance(blocks, Blocks)
    assert blocks.rows is not None
    assert drafted.engine.decoder.mtp is None
    draft = BlockRounds.draft

    def noted(rounds: BlockRounds, B: int, k: int, max_kv_len: int) -> Tensor:
        made.append(draft(rounds, B, k, max_kv_len))
        return made[-1]

    monkeypatch.setattr(BlockRounds, "draft", noted)
    for request in requests(plain, 9):
        expected = plain.engine.submit(request).result()
        assert drafted.engine.submit(request).result() == expected
    ids = torch.cat([drafts.flatten() for drafts in made])
    assert len(blocks.rows.ids) == 500
    assert torch.isin(ids, blocks.rows.ids).all()
    assert len({*ids.tolist()}) > 5


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 4032}, "is for a vocabulary of 4032 tokens, the model has 4096"),
        ({"hidden_size": 128}, "is for hidden states of 128 numbers, the model has 256"),
        ({"num_target_layers": 5}, "is for a model of 5 layers, the model has 4"),
        ({"num_target_layers": 3}, "is for a model of 3 layers, the model has 4"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]}},
            "reads layer 3, the model has layers up to 2 before the last",
        ),
        (
            {
                "num_target_layers": None,
                "dflash_config": {"mask_token_id": 1, "target_layer_ids": [3]},
            },
            "reads layer 3, the model has layers up to 2 before the last",
        ),
        ({"block_size": 1}, "`block_size` must be an integer from 2 to 256, got 1"),
        (
            {"architectures": ["XPressDraftModel"]},
            "config.json: class `XPressDraftModel` is not supported",
        ),
    ],
)
def test_drafters_for_other_models_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_drafter(tmp_path, **changes)
    with pytest.raises(LowbitError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("mode", "asked", "positions"), [("dflash", 15, 7), ("dflash", 3, 3), ("auto", 15, 15)]
)
def test_a_block_of_eight_has_seven_positions(mode: Mode, asked: int, positions: int) -> None:
    """Under `auto` more tokens may be copied than a block has drafts."""
    drafting = load(TRAINED, mode, draft_tokens=asked).engine.drafting
    assert drafting is not None
    assert drafting.positions == positions


def test_what_is_no_drafter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights of the model are read."""
    monkeypatch.setattr("lowbit.runtime.engine.load.load_decoder", None)
    with pytest.raises(UnsupportedModelError, match="is no drafter but a model of its own"):
        load(TARGET)
    with pytest.raises(CheckpointError, match="is neither a folder nor a model on the Hub"):
        load(tmp_path / "nowhere")

    def spoil(name: str, value: float) -> None:
        from safetensors.torch import load_file, save_file

        write_drafter(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        tensors[name][0] = value
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    spoil("hidden_norm.weight", float("nan"))
    with pytest.raises(FormatError, match=r"`hidden_norm\.weight` holds NaN or Inf"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_a_drafter_answers_nothing(tmp_path: Path) -> None:
    write_drafter(tmp_path)
    with pytest.raises(UnsupportedModelError, match=r"is a drafter .* answers nothing by itself"):
        open_model(tmp_path)


def test_the_command_takes_a_drafter(tmp_path: Path) -> None:
    """Packed, and with a model that is quantized as it is loaded."""
    convert(TRAINED, tmp_path / "drafter", Recipe())
    prompt = (str(TARGET), "Once upon a time", "--raw", "--temperature", "0", "--device", "cpu")
    options = ("--max-new-tokens", "40", "--quantize", "int4", "--json")
    drafts = ("--speculate", "dflash", "--drafter", str(tmp_path / "drafter"))
    plain, drafted = (CliRunner().invoke(main, [*prompt, *options, *more]) for more in ((), drafts))
    assert (plain.exit_code, drafted.exit_code) == (0, 0), drafted.output
    found, expected = json.loads(drafted.stdout), json.loads(plain.stdout)
    assert found["text"] == expected["text"]
    assert found["speculation"]["tokens_a_round"] > 1.5
    assert expected["speculation"] is None


@pytest.mark.parametrize("command", ["generate", "chat", "serve", "bench"])
def test_commands_take_the_option(command: str) -> None:
    assert "--drafter" in {name for each in main.commands[command].params for name in each.opts}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--speculate", "dflash"), "--speculate dflash needs --drafter"),
        (("--drafter", "x"), "--drafter needs --speculate dflash or auto"),
        (("--drafter", "x", "--speculate", "ngram"), "--drafter needs --speculate dflash or auto"),
    ],
)
def test_options_without_effect_are_refused(options: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(main, [str(TARGET), "x", *options])
    assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    with pytest.raises(LowbitError, match="`speculate` dflash needs a `drafter`"):
        lowbit.load(TARGET, device="cpu", speculate="dflash")
    with pytest.raises(LowbitError, match="`drafter` needs `speculate` dflash or auto, got ngram"):
        lowbit.load(TARGET, device="cpu", speculate="ngram", drafter=TRAINED)
