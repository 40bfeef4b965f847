"""Logits of a converted folder against the original's: KL, perplexity and equal top tokens.

The codes and scales, W = code * scale, or what a GGUF file's blocks stand for, are put into
transformers' model; all is FP32 without TF32.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from real_models import read_weights
from safetensors.torch import load_file
from torch import Tensor

from lowbit.convert.measure.uncertainty import mean_error

TOKENS = 128  # whose logits are held at once


@dataclass(frozen=True, slots=True)
class Figures:
    """A converted model against the original on one text; errors are standard errors."""

    kl: float
    kl_error: float | None  # of the mean, as in reports; None below 8 windows
    perplexity: float
    top1: float
    top1_error: float | None
    kl_windows: tuple[float, ...]

    def cells(self) -> tuple[str, ...]:
        """KL, perplexity and top-1 agreement as shown in a table."""
        kl = f"{self.kl:.4f}" + ("" if self.kl_error is None else f" ± {self.kl_error:.4f}")
        return kl, f"{self.perplexity:.3f}", f"{self.top1:.1%}"


@dataclass(frozen=True, slots=True)
class Reference:
    """The original on every text."""

    device: str  # where it lies and all else is computed
    windows: Mapping[str, Tensor]  # of a text's name, [windows, T] int64
    hidden: Mapping[str, Tensor]  # what the head is given, [windows, T, h] FP32
    head: Tensor  # [V, h] FP32


@torch.inference_mode()
def read_reference(folder: Path, windows: Mapping[str, Tensor], device: str) -> Reference:
    """Run the layers of the original over every text."""
    model, _ = load(folder, folder, device)
    windows = {name: tokens.to(device) for name, tokens in windows.items()}
    hidden = {name: run_layers(model, tokens) for name, tokens in windows.items()}
    return Reference(device, windows, hidden, model.get_output_embeddings().weight.clone())


@torch.inference_mode()
def measure(reference: Reference, source: Path, folder: Path) -> tuple[dict[str, Figures], int]:
    """Compare a folder with the original on every text; count linears whose weights changed."""
    model, changed = load(source, folder, reference.device)
    head = model.get_output_embeddings().weight
    figures = {
        name: compare(reference, name, run_layers(model, windows), head)
        for name, windows in reference.windows.items()
    }
    return figures, changed


@torch.inference_mode()
def compare_itself(reference: Reference) -> dict[str, Figures]:
    """Figures of the original on every text, whose KL is 0; the layers do not run again."""
    return {
        name: compare(reference, name, hidden, reference.head)
        for name, hidden in reference.hidden.items()
    }


def run_layers(model: Any, windows: Tensor) -> Tensor:
    """Inputs of the head: [windows, T, h]."""
    outputs = (model.base_model(batch, use_cache=False) for batch in torch.split(windows, 4))
    return torch.cat([output.last_hidden_state for output in outputs])


def compare(reference: Reference, text: str, hidden: Tensor, head: Tensor) -> Figures:
    """Mean KL(original || converted) in nats and the like; a window's first token is not scored.

    Logits are made a few tokens at a time: a vocabulary may have 150,000.
    """
    found = []
    for window, of_p, of_q in zip(
        reference.windows[text], reference.hidden[text], hidden, strict=True
    ):
        tokens = []
        for start in range(0, len(window) - 1, TOKENS):
            scored = slice(start, min(start + TOKENS, len(window) - 1))
            p = (of_p[scored] @ reference.head.T).log_softmax(-1)
            q = (of_q[scored] @ head.T).log_softmax(-1)
            following = window[scored.start + 1 : scored.stop + 1, None]
            kl = (p.exp() * (p - q)).sum(-1)
            agree = p.argmax(-1) == q.argmax(-1)
            tokens.append(torch.stack([kl, -q.gather(-1, following)[:, 0], agree.float()]))
        found.append(torch.cat(tokens, 1).double().mean(1))
    kl, nll, top1 = torch.stack(found, 1).cpu()  # each [windows]
    return Figures(
        kl=float(kl.mean()),
        kl_error=mean_error(kl),
        perplexity=float(nll.mean().exp()),
        top1=float(top1.mean()),
        top1_error=mean_error(top1),
        kl_windows=tuple(kl.tolist()),
    )


def load(source: Path, folder: Path, device: str) -> tuple[Any, int]:
    """The causal language model of `source` in FP32 with the weights of `folder`.

    Returns:
        The model, and how many linears have other weights than the original's.

    Raises:
        SystemExit: a weight of the model is in no file.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, attn_implementation="eager"
    )
    model.eval().to(device)
    gguf = find_gguf(folder)
    weights = dequantized(folder, device) if gguf is None else dict(read_weights(model, gguf))
    if "lm_head.weight" in weights:  # a head that was the embedding may be packed, or rotated
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    changed = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and f"{name}.weight" in weights:
            changed += not torch.equal(module.weight, weights[f"{name}.weight"])
    missing = model.load_state_dict(weights, strict=False).missing_keys
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    if set(missing) - tied:
        sys.exit(f"{folder} lacks {', '.join(missing)}")
    return model, changed


def find_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder, if it has one."""
    return next(iter(folder.glob("*.gguf")), None)


def dequantized(folder: Path, device: str) -> dict[str, Tensor]:
    """Weights in FP32, of packed linears W = code * scale, as compressed-tensors defines it.

    transformers unpacks Qwen3.5 in BF16 whatever dtype is asked for, and so would add an error.
    """
    files: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        files |= load_file(path, device)
    weights = {}
    for name, tensor in files.items():
        module, _, kind = name.rpartition(".")
        if kind == "weight_packed":  # [N, K * bits / 32] int32, low bits first, plus 2^(bits - 1)
            scale = files[f"{module}.weight_scale"].float()  # [N, K / group]
            K = int(files[f"{module}.weight_shape"][1])
            bits = 32 * tensor.shape[1] // K
            words, places = tensor.long() & 0xFFFFFFFF, bits * torch.arange(K, device=device)
            following = words.roll(-1, 1) << 32  # a code of 3 bits may reach into the next word
            both = (words | following)[:, places // 32]
            codes = (both >> places % 32 & (2**bits - 1)) - 2 ** (bits - 1)
            weights[f"{module}.weight"] = codes * scale.repeat_interleave(K // scale.shape[1], 1)
        elif kind in ("weight_zero_point", "weight_g_idx"):
            sys.exit(f"{folder}: {name} is not understood")
        elif kind not in ("weight_scale", "weight_shape"):
            weights[name] = tensor.float()
    return {name.replace("language_model.", ""): weight for name, weight in weights.items()}
