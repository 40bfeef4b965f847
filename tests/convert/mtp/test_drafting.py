"""Rounds of drafts against a naive head in FP64, which computes each round by itself."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.mtp.drafting import (
    WINDOWS,
    count_drafts,
    drafted_windows,
    measure_drafting,
)
from lowbit.convert.mtp.head import greedy_tokens
from lowbit.convert.original.model import load_layered_model
from lowbit.convert.original.threads import alone_on_threads
from lowbit.convert.original.weights import open_weights
from lowbit.formats.draft_head import open_draft_head
from lowbit.formats.layout.packing import dequantize, unpack
from tests.conversions import convert
from tests.convert.naive_mtp import naive_head
from tests.lanes import in_commands
from tests.oracle import dequantized_weights

T = 14
CPU = torch.device("cpu")
HYBRID = Path(__file__).parents[3] / "examples/models/tiny-qwen3.5"


def naive_counts(
    w: dict[str, Tensor],
    config: dict[str, Any],
    head: Tensor,
    ids: Tensor,
    states: Tensor,
    few: tuple[Tensor, Tensor] | None = None,
) -> list[tuple[int, int]]:
    """(reached, right) of four drafts on one window, drafts of a few tokens and rows if given."""
    tokens_of, rows = few or (torch.arange(len(head)), head)
    greedy = (states @ head.T).argmax(-1)
    counts = [[0, 0] for _ in range(4)]
    for start in range(len(states) - 1):
        tokens, seen = ids[1 : start + 2], states[: start + 1]
        for depth in range(1, 5):
            if start + depth >= len(states):
                break
            state = naive_head(w, config, tokens, seen)
            draft, wanted = tokens_of[(rows @ state).argmax()], greedy[start + depth]
            counts[depth - 1][0] += 1
            if draft != wanted:
                break
            counts[depth - 1][1] += 1
            if ids[start + depth + 1] != wanted:
                break
            tokens, seen = torch.cat((tokens, draft[None])), torch.cat((seen, state[None]))
    return [(reached, right) for reached, right in counts]


@pytest.fixture(scope="module")
def text() -> Tensor:
    from tokenizers import Tokenizer

    stories = HYBRID.parents[1] / "data" / "stories-eval.txt"
    tokenizer = Tokenizer.from_file(str(HYBRID / "tokenizer.json"))
    ids = tokenizer.encode(stories.read_text(encoding="utf-8")[:1500]).ids
    return torch.tensor(ids[: 3 * T]).view(3, T)


@in_commands("recipe1", "recipe2")
@pytest.mark.filterwarnings("ignore")  # other libraries' own
@pytest.mark.parametrize("recipe", [None, Recipe(), Recipe(mtp="bf16", head="bf16")])
def test_counts_equal_those_of_rounds_by_themselves(
    tmp_path: Path, text: Tensor, recipe: Recipe | None
) -> None:
    from transformers import AutoModelForCausalLM

    folder = HYBRID if recipe is None else convert(HYBRID, tmp_path / "out", recipe).folder
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = trunk(text, output_hidden_states=True).hidden_states
        states = hidden[-1][:, :-1].contiguous()  # after the final norm
        model = load_layered_model(open_weights(folder), T, CPU)
        with alone_on_threads(CPU) as pool:
            greedy = greedy_tokens(model, states.flatten(0, 1), pool).view(states.shape[:2])
            found = count_drafts(model, text, states.clone(), greedy, pool)
    stored = load_file(HYBRID / "model.safetensors") if recipe is None else None
    w = {n: x.double() for n, x in (stored or dequantized_weights(folder)).items()}
    config = json.loads((HYBRID / "config.json").read_text())["text_config"]
    head = w.get("lm_head.weight", w["model.language_model.embed_tokens.weight"])
    with torch.inference_mode():
        rounds = [
            naive_counts(w, config, head, ids, one.double())
            for ids, one in zip(text, states, strict=True)
        ]
    expected = [(sum(r[n][0] for r in rounds), sum(r[n][1] for r in rounds)) for n in range(4)]
    assert [(draft.reached, draft.right) for draft in found] == expected
    assert expected[0][0] == 3 * (T - 2)
    assert expected[3][1] > 0  # the deepest drafts are tried too
    accepted, tokens = 1.0, 1.0
    for draft in found:
        accepted *= draft.right / draft.reached
        tokens += accepted
        assert (draft.accepted, draft.tokens_a_round) == pytest.approx((accepted, tokens))


@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_drafts_of_a_few_tokens(tmp_path: Path, text: Tensor) -> None:
    from transformers import AutoModelForCausalLM

    folder = convert(HYBRID, tmp_path / "out", Recipe(draft_vocabulary=300)).folder
    config = json.loads((folder / "config.json").read_text())
    draft_head = open_draft_head(folder, config)
    assert draft_head is not None
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = trunk(text, output_hidden_states=True).hidden_states[-1][:, :-1].contiguous()
        model = load_layered_model(open_weights(folder), T, CPU)
        with alone_on_threads(CPU) as pool:
            both = (states.clone(), states.clone())
            found = measure_drafting((model, model), text, both, draft_head, pool)
    assert found is not None
    w = {n: x.double() for n, x in dequantized_weights(folder).items()}
    stored = load_file(folder / "draft/head.safetensors")
    rows = dequantize(unpack(stored["weight_packed"], 4, 256), stored["weight_scale"]).double()
    few = stored["ids"].long(), rows
    with torch.inference_mode():
        rounds = [
            naive_counts(w, config["text_config"], w["lm_head.weight"], ids, one.double(), few)
            for ids, one in zip(text, states, strict=True)
        ]
    expected = [(sum(r[n][0] for r in rounds), sum(r[n][1] for r in rounds)) for n in range(4)]
    assert [(draft.reached, draft.right) for draft in found.draft_head] == expected
    assert found.original == found.packed != found.draft_head
    greedy = (states @ w["lm_head.weight"].float().T).argmax(-1).flatten().tolist()
    covered = sum(token in set(few[0].tolist()) for token in greedy) / len(greedy)
    assert found.covered == pytest.approx(covered)
    assert (found.draft_rows, covered < 1) == (300, True)


def test_no_head_no_drafts(tmp_path: Path, text: Tensor) -> None:
    folder = convert(HYBRID, tmp_path / "out", Recipe(mtp="drop")).folder
    model = load_layered_model(open_weights(folder), T, CPU)
    with alone_on_threads(CPU) as pool:
        states, greedy = torch.zeros(3, T - 1, 256), torch.zeros(3, T - 1, dtype=torch.int64)
        assert count_drafts(model, text, states, greedy, pool) == ()


def test_windows_of_every_text() -> None:
    found = drafted_windows([WINDOWS + 3, 2, 1])
    assert found == [*range(WINDOWS), WINDOWS + 3, WINDOWS + 4, WINDOWS + 5]
