"""Training a drafter for a real model: its layers, its loss and its prompts."""

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from lowbit.formats.architectures import read_config, tensor_table
from tests.drafters import hidden_by_torch
from tests.test_examples import EXAMPLES, MAINTENANCE, started

pytestmark = pytest.mark.scripts

NAME = re.compile(r"(?:file|title)\d+q")
LINE_ENDS = "\x85", "\u2028", "\u2029"  # that JSON leaves as they are, and `splitlines` splits at

TARGET = {
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 1e6},
}


@pytest.fixture(scope="module")
def trainer() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(MAINTENANCE))
        return runpy.run_path(str(MAINTENANCE / "train_drafter.py"))


def test_trained_layers_are_those_of_plain_torch(trainer: dict[str, Any], tmp_path: Path) -> None:
    """Blocks of two texts at once see nothing but what is before them."""
    torch.manual_seed(0)
    sizes = trainer["sizes_of"](TARGET, 3)
    assert sizes.taps == (1, 6, 11, 16, 21)
    config = trainer["drafter_config"](TARGET, sizes)
    trunk = trainer["DFlash"](96, sizes=sizes)
    for parameter in trunk.parameters():
        parameter.data = parameter.data.bfloat16().float()  # as they are written
    trainer["write"](trunk.state_dict(), config, tmp_path)
    weights = {name: w.float() for name, w in load_file(tmp_path / "model.safetensors").items()}
    table = {spec.name: spec.shape for spec in tensor_table(config)}
    assert {name: tuple(w.shape) for name, w in weights.items()} == table
    assert read_config(config).block_drafts is not None
    taps, embedded = torch.randn(2, 20, 5 * 96), torch.randn(2, 24, 96)
    anchors = torch.tensor([[3, 19, 8], [1, 2, 11]])
    with torch.no_grad():
        found = trunk(trunk.context(taps), embedded, anchors)
    for text, own in enumerate(anchors.tolist()):
        for number, first in enumerate(own):
            block = slice(8 * number, 8 * number + 8)
            expected = hidden_by_torch(config, weights, taps[text, :first], embedded[text, block])
            torch.testing.assert_close(found[text, block], expected, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_cross_entropy(trainer: dict[str, Any]) -> None:
    """And its gradient autograd's, in parts of another size than the whole."""
    torch.manual_seed(1)
    loss_of = trainer["HeadLoss"]
    loss_of.forward.__globals__["ROWS"] = 8
    hidden, final, head = torch.randn(20, 16), torch.randn(20, 16), torch.randn(50, 16)
    weight = torch.rand(20)
    mine, other = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    found = loss_of.apply(mine, final, head, weight) / weight.sum()
    found.backward()
    aim = (final @ head.T / trainer["TEMPERATURE"]).softmax(-1)
    each = functional.cross_entropy(other @ head.T, aim, reduction="none")
    expected = (each * weight).sum() / weight.sum()
    expected.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(mine.grad, other.grad)


def test_no_file_and_no_article_is_both_trained_on_and_measured(tmp_path: Path) -> None:
    code, prose, out = tmp_path / "code", tmp_path / "prose.txt", tmp_path / "out"
    code.mkdir()
    for n in range(60):
        said = f'    """Add up all of the numbers that file{n}q is given."""\n'
        body = "".join(f"    total += {n} * x[{k}]\n" for k in range(9))
        source = f"\f\ndef file{n}q(x):\n{said}    total = 0\n{body}    return total\n"
        (code / f"m{n}.py").write_text(source)
    told = (f" = title{n}q = \n Of title{n}q " + "much is told " * 12 for n in range(60))
    prose.write_text("\n".join(told))
    done = started("draft_prompts", (str(out), "--code", str(code), "--prose", str(prose)))
    assert done.exit_code == 0, done.output
    written = {path.stem: path.read_text() for path in out.glob("*.jsonl")}
    names = {stem: {*NAME.findall(text)} for stem, text in written.items()}
    trained, measured = names["train"], names["code"] | names["prose"]
    assert {name[:4] for name in names["code"]} == {"file"}
    assert {name[:4] for name in names["prose"]} == {"titl"}
    assert trained.isdisjoint(measured)
    assert len(trained | measured) == 120
    asked = [json.loads(line)["prompt"] for line in "".join(written.values()).splitlines()]
    given = [each for each in asked if "    total = 0" in each]
    assert given
    assert all(re.search(r"def file\d+q", each) and "    return total" in each for each in given)


def test_questions_may_have_line_ends_of_unicode(tmp_path: Path) -> None:
    questions, out = tmp_path / "q.jsonl", tmp_path / "out"
    asked = [f"Is {n} odd?{end}Or even?" for n in range(40) for end in LINE_ENDS]
    lines = (json.dumps({"question": each}, ensure_ascii=False) for each in asked)
    questions.write_text("\n".join(lines), "utf-8")
    done = started("draft_prompts", (str(out), "--questions", str(questions)))
    assert done.exit_code == 0, done.output
    written = [(out / f"{name}.jsonl").read_text() for name in ("train", "prose")]
    found = "\n".join(json.loads(line)["prompt"] for line in "".join(written).splitlines())
    assert all(each in found for each in asked)


def test_answers_that_are_all_too_short_are_an_error(tmp_path: Path) -> None:
    model, prompts, out = EXAMPLES / "models" / "tiny-qwen3", tmp_path / "p.jsonl", tmp_path / "t"
    prompts.write_text(json.dumps({"prompt": "Tell of cats. " * 200}))
    done = started(
        "train_drafter", ("texts", str(model), str(prompts), str(out), "--device", "cpu")
    )
    assert done.exit_code == 1
    assert "no answer has 8 tokens or more, of the 1 prompts in" in done.output
    assert not out.exists()


@pytest.mark.slow
def test_a_drafter_is_trained_on_answers_and_drafts(tmp_path: Path) -> None:
    model, prompts, out = EXAMPLES / "models" / "tiny-qwen3", tmp_path / "p.jsonl", tmp_path / "d"
    told = [f"Tell of {n} cats.{end}Be short." for n in range(2) for end in LINE_ENDS]
    lines = (
        json.dumps({"id": n, "prompt": each}, ensure_ascii=False) for n, each in enumerate(told)
    )
    prompts.write_text("\n".join(lines), "utf-8")
    texts = tmp_path / "t.safetensors"
    small = ("--device", "cpu", "--new-tokens", "24", "--together", "4", "--temperature", "0")
    run = ("texts", str(model), str(prompts), str(texts), *small)
    done = started("train_drafter", run)
    assert done.exit_code == 0, done.output
    sizes = ("--batch", "4", "--anchors", "4", "--layers", "1", "--minutes", "0.03")
    more = ("train", str(model), str(texts), str(out), "--held-out", str(texts), *sizes)
    done = started("train_drafter", (*more, "--device", "cpu"))
    assert done.exit_code == 0, done.output
    assert "t: " in done.output
    measured = (str(model), str(out), "--prompts", str(prompts), "--answer", "8")
    done = started("measure_drafters", measured)
    assert done.exit_code == 0, done.output
    assert f"| {out.name} | " in done.output
