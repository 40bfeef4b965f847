"""Kinds of text, positions, noise, flips and output errors against transformers' whole model."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lowbit.convert import Recipe
from lowbit.convert.measure import measure as measure_module
from lowbit.convert.measure.measure import Measured
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.original.weights import open_weights
from lowbit.convert.texts.evaluation import Text, default_texts, tokenize
from lowbit.formats.errors import ResourceError
from tests.conversions import convert
from tests.convert.measure.conftest import Measure, WholeLogits
from tests.short_models import Shorten

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore")  # other libraries' own


@pytest.fixture(scope="module")
def texts(stories: str) -> dict[str, str]:
    """Two windows of stories and one of mathematics."""
    return {"stories": stories[:4500], "maths": default_texts()[1].content[:1500]}


@pytest.fixture(scope="module")
def pair(shorten: Shorten, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An original and its INT4 form; a dense one is in test_logits.py."""
    source = shorten("tiny-qwen3.5")
    return [source, convert(source, tmp_path_factory.mktemp("pair") / "packed", Recipe()).folder]


@pytest.fixture(scope="module")
def found(pair: list[Path], texts: dict[str, str], measure: Measure) -> Measured:
    return measure(*pair, **texts)


Shares = tuple[Tensor, Tensor]  # log softmax of the original and of its packed form


@pytest.fixture(scope="module")
def shares(pair: list[Path], texts: dict[str, str], whole_logits: WholeLogits) -> list[Shares]:
    """Transformers' log softmax over the windows of each text."""
    stories, maths = (
        (log_shares(whole_logits(pair[0], windows)), log_shares(whole_logits(pair[1], windows)))
        for windows in windows_of(pair[0], texts)
    )
    return [stories, maths]


def windows_of(folder: Path, texts: dict[str, str]) -> tuple[Tensor, Tensor]:
    stories, maths = tokenize(folder, [Text(n, n, text) for n, text in texts.items()], 2048)
    return stories.windows, maths.windows


def log_shares(logits: Tensor) -> Tensor:
    return logits[:, :-1].double().log_softmax(-1)


@pytest.mark.commands
def test_by_kind(
    found: Measured, pair: list[Path], texts: dict[str, str], shares: list[Shares]
) -> None:
    assert [kind.name for kind in found.logits.kinds] == ["stories", "maths"]
    windows_by_kind = windows_of(pair[0], texts)
    for kind, windows, (p, q) in zip(found.logits.kinds, windows_by_kind, shares, strict=True):
        assert kind.tokens == windows[:, 1:].numel()
        kl = (p.exp() * (p - q)).sum(-1)
        assert kind.kl_mean == pytest.approx(float(kl.mean()), rel=1e-3)
        assert kind.kl_p99 == pytest.approx(float(kl.flatten().quantile(0.99)), rel=0.1)
        assert kind.kl_error is None  # of fewer than 8 windows
        agree = (p.argmax(-1) == q.argmax(-1)).double().mean()
        assert kind.top1_agreement == pytest.approx(float(agree), abs=0.002)
        for log_p, perplexity in ((p, kind.perplexity_original), (q, kind.perplexity_packed)):
            nll = -log_p.gather(-1, windows[:, 1:, None]).mean()
            assert perplexity == pytest.approx(float(nll.exp()), rel=1e-5)
    first = found.logits.kinds[0]
    assert (found.logits.text_name, found.logits.text_sha256) == ("stories", first.sha256)
    assert (found.logits.kl_mean, found.logits.scored_tokens) == (first.kl_mean, first.tokens)


def test_noise_is_that_of_the_whole_model_in_bf16(
    found: Measured,
    pair: list[Path],
    texts: dict[str, str],
    shares: list[Shares],
    whole_logits: WholeLogits,
) -> None:
    windows = windows_of(pair[0], texts)[0]
    p, q = shares[0][0], log_shares(whole_logits(pair[0], windows, torch.bfloat16))
    kl = (p.exp() * (p - q)).sum(-1)
    assert found.logits.noise is not None
    # Other batches round otherwise, so that single tokens differ; the floor does not.
    assert found.logits.noise.kl_mean == pytest.approx(float(kl.mean()), rel=0.05)
    assert found.logits.noise.kl_p99 == pytest.approx(float(kl.quantile(0.99)), rel=0.2)
    agree = float((p.argmax(-1) == q.argmax(-1)).double().mean())
    assert found.logits.noise.top1_agreement == pytest.approx(agree, abs=0.01)
    assert 0 < found.logits.noise.kl_mean < found.logits.kl_mean / 10


def test_by_position(
    found: Measured, pair: list[Path], texts: dict[str, str], whole_logits: WholeLogits
) -> None:
    text = tokenize(pair[0], [Text("stories", "stories", texts["stories"])], 2048)[0]
    windows = text.ids[None]
    assert 1024 < windows.shape[1] < 2048
    p, q = (log_shares(whole_logits(folder, windows))[0] for folder in pair)
    kl = (p.exp() * (p - q)).sum(-1)
    labels = windows[0, 1:, None]
    rows = found.logits.positions
    assert [row.start for row in rows] == [0, 128, 256, 512, 1024]
    assert rows[-1].stop == windows.shape[1]
    for row in rows:
        here = slice(row.start, row.stop)
        assert row.tokens == len(kl[here])
        assert row.kl_mean == pytest.approx(float(kl[here].mean()), rel=1e-3)
        for log_p, nll in ((p, row.nll_original), (q, row.nll_packed)):
            expected = -float(log_p[here].gather(-1, labels[here]).mean())
            assert nll == pytest.approx(expected, rel=1e-5)


def test_flips(
    found: Measured, pair: list[Path], texts: dict[str, str], shares: list[Shares]
) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    expected = []
    for name, windows, (p, q) in zip(texts, windows_of(pair[0], texts), shares, strict=True):
        kl = (p.exp() * (p - q)).sum(-1)
        changed = p.argmax(-1) != q.argmax(-1)
        for number, window in enumerate(windows):
            row = kl[number].where(changed[number], -1.0)
            place = int(row.argmax())
            top = int(p[number, place].argmax())
            ids = (window[place + 1], top, q[number, place].argmax())
            odds = [float(x[number, place, top].exp()) for x in (p, q)]
            before = tokenizer.decode(window[: place + 1])[-80:]
            words = [tokenizer.decode([int(i)]) for i in ids]
            expected.append((float(row[place]), name, before, words, odds))
    expected.sort(reverse=True)
    assert len(found.logits.flips) == len(expected) == 3
    for flip, (kl_here, name, before, words, odds) in zip(
        found.logits.flips, expected, strict=True
    ):
        assert (flip.kind, flip.before) == (name, before)
        assert [flip.actual, flip.original, flip.packed] == words
        assert flip.original != flip.packed
        assert (flip.kl, flip.p_original, flip.p_packed) == pytest.approx(
            (kl_here, *odds), rel=1e-3
        )


def test_output_errors_equal_fp64(found: Measured, pair: list[Path], texts: dict[str, str]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()
    packed = open_weights(pair[1])
    prefix = "model.language_model.layers."
    inside = [name for name in packed.packed_schemes() if name.startswith(prefix)]
    assert sorted(found.output_errors) == sorted(inside)
    seen: dict[str, Tensor] = {}
    for name in (inside[0], inside[-1], inside[len(inside) // 2]):
        module = model.get_submodule(name.replace("model.language_model.", "model."))
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[0]}))
    with torch.inference_mode():
        model(windows_of(pair[0], texts)[0])
    for name, x in seen.items():
        w = open_weights(pair[0]).read(f"{name}.weight", packed.shape(f"{name}.weight"), CPU)
        p = packed.read(f"{name}.weight", tuple(w.shape), CPU)
        x, w, p = x.double(), w.double(), p.double()
        expected = (x @ (w - p).T).norm() / (x @ w.T).norm()
        assert found.output_errors[name] == pytest.approx(float(expected), rel=1e-3), name


def test_one_text_has_no_kinds_and_a_short_one_no_positions(
    short: Path, packed: Path, stories: str, measure: Measure
) -> None:
    found = measure(short, packed, stories=stories[:600]).logits
    assert found.kinds == ()
    assert found.positions == ()
    assert found.noise is not None
    assert len(found.flips) <= 1


def test_memory_is_announced_or_refused_before_the_work(
    short: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    text = [Text("a", "a", "Once upon a time there was a dog. " * 4)]
    measure_module.measure_logits(open_pair(short, packed), text, note=said.append)
    assert len(said) == 1
    scored = re.fullmatch(r"comparing logits of (\d+) tokens(, and of .*)?, in .*", said[0])
    assert scored is not None
    assert int(scored[1]) == tokenize(short, text, 2048)[0].windows.numel()
    assert said[0].endswith(" GB of memory")
    measure_module.measure_logits(open_pair(short, packed), text * 2, note=said.append)
    assert re.match(rf"comparing logits of {2 * int(scored[1])} tokens of 2 texts", said[1])
    monkeypatch.setattr("lowbit.convert.plan.memory.free_bytes", lambda device: 1000)
    monkeypatch.setattr(measure_module, "compare", lambda *_: pytest.fail("work began"))
    with pytest.raises(ResourceError, match="free on cpu"):
        measure_module.measure_logits(open_pair(short, packed), text)
