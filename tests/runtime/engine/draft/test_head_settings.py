"""Every head of a drafter on trained layers, with all that is rounded: answers without a trace."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lowbit.runtime as lowbit
from lowbit.runtime.engine.request import Request
from lowbit.runtime.engine.stream import Handle
from tests.drafters import CONFIG, KINDS, shapes
from tests.lanes import in_commands
from tests.runtime.engine.draft.test_dspark import TARGET, TEXT, always_drafting, load
from tests.runtime.engine.residues import Residues, follows

TRUNK = TARGET.with_name("tiny-qwen3.5-dflash")
GREEDY = lowbit.SamplingParams(logprobs=2)
SIZE = 4096  # of the bundled vocabulary
HOT = lowbit.SamplingParams(0.8, top_k=20, top_p=0.95, seed=5, logprobs=1)
STRICT = lowbit.SamplingParams(0.7, presence_penalty=0.5, logit_bias=((9, 2.0),), seed=4)
OPTIONS: dict[str, Any] = {
    "dtype": torch.bfloat16,
    "quantize": "int4",
    "kv_cache": "int8",
    "activations": "int8",
}
# These draft what the layers do, with a head so small; the others' outputs stand elsewhere, or
# their head alone decides.
TRAINED = ("dflash", "xpress", "domino", "dflash2")


def write_small_head(folder: Path, kind: str) -> None:
    """The bundled drafter's layers with a head of small random numbers."""
    trunk, base = json.loads((TRUNK / "config.json").read_text()), KINDS[kind]
    layers = trunk["dflash_config"]
    own = {key: value for key, value in base.items() if CONFIG.get(key) != value}
    config = {**trunk, **own, "layer_types": trunk["layer_types"]}
    if "dflash_config" in base:
        section = {**base["dflash_config"], **layers, "shift_label": False}
        config["dflash_config"] = {
            key: section[key] for key in section if section[key] is not False
        }
    else:
        config |= layers
    generator = torch.Generator().manual_seed(1)
    known = load_file(TRUNK / "model.safetensors")
    weights = {
        name: 0.02 * torch.randn(shape, generator=generator)
        for name, shape in shapes(config).items()
    }
    for name in weights:
        if name.endswith("base_kernel"):
            weights[name][:, 0] += 1  # a token sees itself
    folder.mkdir(exist_ok=True)
    made = {name: values.bfloat16() for name, values in weights.items()}
    save_file(made | known, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def requests(model: lowbit.Model, stop: int) -> list[Request]:
    """Greedy, drawn, penalized, one that a stop token ends, and one under a constraint."""
    starts = ("Once upon a time", TEXT[:200], "Lily")
    ids = [tuple(model.tokenizer.encode(text, framed=True, context=400)) for text in starts]
    asked = [Request(*each, 8) for each in zip(ids, (GREEDY, HOT, STRICT), strict=True)]
    ending = Request(ids[0], GREEDY, 8, stop_ids=frozenset({stop}))
    return [*asked, ending, Request(ids[2], HOT, 4, constraint=Residues(size=SIZE))]


@pytest.fixture(scope="module")
def plain() -> tuple[list[Handle], int]:
    """Answers without drafts, each alone, and a token in the middle of the first one."""
    model = load(None, **OPTIONS)
    first = model.engine.submit(requests(model, 0)[0]).result()
    stop = next(token for place, token in enumerate(first) if place > 4 and token not in first[:4])
    handles = [model.engine.submit(each) for each in requests(model, stop)]
    for handle in handles:
        handle.result()
    return handles, stop


@in_commands("xpress", "domino", "dflash2", "dflash", "dspark")
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_changes_nothing(tmp_path: Path, kind: str, plain: tuple[list[Handle], int]) -> None:
    """Alone, and in company with a constrained sequence among them."""
    expected, stop = plain
    write_small_head(tmp_path, kind)
    model = always_drafting(load(tmp_path, **OPTIONS))
    asked = requests(model, stop)
    alone = model.engine.submit(asked[0])
    assert_same(alone, expected[0])
    assert alone.tally.tokens_a_round is not None
    assert alone.tally.tokens_a_round >= (1.4 if kind in TRAINED else 1.0)
    model.engine.forget()
    together = [model.engine.submit(each) for each in asked]
    for found, wanted in zip(together, expected, strict=True):
        assert_same(found, wanted)
    assert all(each.tally.rounds for each in together[:3])
    assert expected[3].finish_reason == "stop"
    assert follows(together[4].result(), size=SIZE)


def assert_same(found: Handle, wanted: Handle) -> None:
    assert found.result() == wanted.result()
    assert found.log_probabilities == wanted.log_probabilities
    assert found.finish_reason == wanted.finish_reason
