"""A packed model with inputs in eight bits: figures of a whole model, rounded another way."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit.convert.measure.measure import measure_logits
from lowbit.convert.measure.pair import open_pair
from lowbit.convert.measure.rounded_inputs import input_groups
from lowbit.convert.texts.evaluation import Text, tokenize
from lowbit.formats.activations import quantize_activations
from lowbit.formats.errors import RequestError
from lowbit.formats.layout.scheme import Scheme
from tests.convert.measure.conftest import WholeLogits


def rounded(_: torch.nn.Module, inputs: tuple[Tensor]) -> Tensor:
    x = inputs[0]
    groups = (quantize_activations(part, 128) for part in torch.split(x.flatten(0, 1), 128, dim=1))
    return torch.cat([q.float() * s for q, s in groups], dim=1).view(x.shape)


@pytest.mark.filterwarnings("ignore")  # other libraries' own
def test_figures_are_those_of_a_whole_model_with_rounded_inputs(
    whole_logits: WholeLogits, short: Path, packed: Path, stories: str
) -> None:
    from transformers import AutoModelForCausalLM

    texts = [Text(name, name, stories[start:][:700]) for name, start in (("a", 0), ("b", 2000))]
    found = measure_logits(open_pair(short, packed), texts, activations="int8").logits
    windows = torch.cat([tokenize(short, [text], 128)[0].windows for text in texts])
    model = AutoModelForCausalLM.from_pretrained(packed, dtype=torch.float32).eval()
    for name, module in model.named_modules():
        if name.endswith("_proj"):  # not the head
            module.register_forward_pre_hook(rounded)
    with torch.inference_mode():
        b = model(windows).logits[:, :-1].double()
    a = whole_logits(short, windows)[:, :-1].double()
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = (p.exp() * (p - q)).sum(-1).mean(1)
    nll = -q.gather(-1, windows[:, 1:, None]).mean(1)[:, 0]
    same = (a.argmax(-1) == b.argmax(-1)).double().mean(1)
    for number, (row, stored) in enumerate(zip(found.int8_inputs, found.kinds, strict=True)):
        assert row.name == texts[number].name
        assert row.kl_mean == pytest.approx(float(kl[number]), rel=1e-4)
        assert row.kl_added == pytest.approx(row.kl_mean - stored.kl_mean, abs=1e-9)
        assert abs(row.kl_added) > 1e-3 * row.kl_mean  # ten times what that bound allows
        assert row.perplexity_packed == pytest.approx(float(nll[number].exp()), rel=1e-5)
        assert row.top1_agreement == pytest.approx(float(same[number]), abs=0.009)  # of 127


@pytest.mark.parametrize(
    "module", ["lm_head", "model.layers.0.mlp.gate", "mtp.layers.0.mlp.up_proj"]
)
def test_a_folder_without_packed_layers_is_refused(module: str, stories: str) -> None:
    packed: Any = SimpleNamespace(packed_schemes=lambda: {module: Scheme(4, 128)})
    pair: Any = SimpleNamespace(packed=packed)
    with pytest.raises(RequestError, match="changes nothing"):
        measure_logits(pair, [Text("a", "a", stories)], activations="int8")


@pytest.mark.gpu
def test_figures_of_a_gpu(short: Path, packed: Path, stories: str) -> None:
    pair, text = open_pair(short, packed), [Text("a", "a", stories[:3000])]
    cpu, gpu = (
        measure_logits(pair, text, device, activations="int8").logits.int8_inputs[0]
        for device in ("cpu", "cuda")
    )
    assert gpu.kl_mean == pytest.approx(cpu.kl_mean, rel=2e-3)
    assert gpu.perplexity_packed == pytest.approx(cpu.perplexity_packed, rel=1e-4)


def test_experts_are_rounded_in_their_groups_and_routers_are_not() -> None:
    prefix = "model.layers.1."
    names = ("mlp.gate", "mlp.shared_expert_gate", "mlp.experts.0.down_proj", "self_attn.q_proj")
    schemes = {
        **{f"{prefix}{name}": Scheme(4, 64) for name in names},
        f"{prefix}self_attn.o_proj": Scheme(8, None),
        "model.layers.11.mlp.up_proj": Scheme(4, 64),
        "lm_head": Scheme(8, 128),
    }
    weights = SimpleNamespace(packed_schemes=lambda: schemes, shape=lambda name: (8, 576))
    model: Any = SimpleNamespace(prefix="model.", weights=weights)
    expected = {"mlp.experts.0.down_proj": 64, "self_attn.q_proj": 64, "self_attn.o_proj": 128}
    assert input_groups(model, 1, rotated=False) == expected
    rotated = expected | {"self_attn.q_proj": 576}  # one scale a token behind a norm
    assert input_groups(model, 1, rotated=True) == rotated
