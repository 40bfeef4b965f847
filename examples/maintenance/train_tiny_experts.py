"""Train the bundled mixtures of experts, tiny-qwen3-moe and tiny-qwen3.5-moe, in minutes on a CPU.

python examples/maintenance/train_tiny_experts.py stories.txt \\
    examples/models/tiny-qwen3 tiny-qwen3-moe
python examples/maintenance/train_tiny_experts.py stories.txt \\
    examples/models/tiny-qwen3.5 tiny-qwen3.5-moe

Everything starts from the dense sibling: the neurons of each of its MLPs are dealt to the experts,
and the sibling's own predictions are the target. What is written has the layout of the checkpoints
on the Hub: Qwen3's experts are stored one by one, those of Qwen3.5 in two tensors a layer, and one
by one in its head for multi-token prediction.
"""

import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

EXPERTS, CHOSEN = 6, 2
WINDOW, BATCH = 256, 8
TEMPERATURE = 1.0
BALANCE = 0.01  # weight of the loss that spreads tokens over experts
PEAK = {"inherited": 5e-4, "new": 2e-3}  # learning rates
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def expert_config(dense: dict[str, Any]) -> dict[str, Any]:
    """config.json of the mixture: the sibling's, its MLP replaced by experts."""
    nested = "text_config" in dense
    text = dict(dense["text_config"] if nested else dense)
    inner = text.pop("intermediate_size") // EXPERTS
    text |= {
        "num_experts": EXPERTS,
        "num_experts_per_tok": CHOSEN,
        "moe_intermediate_size": inner,
        "mlp_only_layers": [],
        "router_aux_loss_coef": BALANCE,
    }
    if not nested:
        text |= {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "intermediate_size": inner * EXPERTS,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        }
        return text
    text |= {"model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": inner}
    outer = {key: value for key, value in dense.items() if key != "vision_config"}
    return outer | {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text,
    }


def text_model(config: dict[str, Any]) -> Any:
    """The decoder of a config.json as transformers builds it, with random weights, in FP32."""
    text = config.get("text_config", config) | {
        "tie_word_embeddings": config["tie_word_embeddings"]
    }
    content = {key: value for key, value in text.items() if key not in ("architectures", "dtype")}
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**content), dtype=torch.float32, attn_implementation="sdpa"
    )


def deal_neurons(mlp: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of a layer of experts from those of a dense MLP.

    Args:
        mlp: `gate_proj.weight` and `up_proj.weight` [I, h], `down_proj.weight` [h, I].
        config: of the mixture's decoder.
    """
    inner, h = config["moe_intermediate_size"], config["hidden_size"]
    gate, up = (mlp[f"{name}_proj.weight"].view(EXPERTS, inner, h) for name in ("gate", "up"))
    down = mlp["down_proj.weight"].view(h, EXPERTS, inner).transpose(0, 1)
    made = {
        "gate.weight": torch.randn(EXPERTS, h) * 0.02,
        "experts.gate_up_proj": torch.cat((gate, up), dim=1),
        # The output is a mean over few experts, where the sibling's was the sum over all.
        "experts.down_proj": down * (EXPERTS / CHOSEN),
    }
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        made |= {
            "shared_expert.gate_proj.weight": torch.randn(shared, h) * 0.05,
            "shared_expert.up_proj.weight": torch.randn(shared, h) * 0.05,
            "shared_expert.down_proj.weight": torch.zeros(h, shared),
            "shared_expert_gate.weight": torch.zeros(1, h),
        }
    return {name: value.clone() for name, value in made.items()}


def upcycle(dense: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Weights of the mixture, with its MLPs fused, from those of the dense sibling."""
    text = config.get("text_config", config)
    mlps: dict[str, dict[str, Tensor]] = {}
    made = {}
    for name, value in dense.items():
        before, found, rest = name.partition(".mlp.")
        if found:
            mlps.setdefault(before, {})[rest] = value.float()
        elif "visual" not in name:
            made[name.replace("model.language_model.", "model.")] = value.float()
    for before, mlp in mlps.items():
        for name, value in deal_neurons(mlp, text).items():
            made[f"{before}.mlp.{name}".replace("model.language_model.", "model.")] = value
    return made


def learning_rate(done: float) -> float:
    """Share of the peak at a share of the time: a short rise, then a cosine to a fiftieth."""
    if done < 0.03:
        return done / 0.03
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (done - 0.03) / 0.97))


def batches(ids: Tensor, generator: torch.Generator) -> Tensor:
    """Windows that begin anywhere: [BATCH, WINDOW]."""
    starts = torch.randint(len(ids) - WINDOW, (BATCH,), generator=generator)
    return torch.stack([ids[start : start + WINDOW] for start in starts.tolist()])


def divergence(logits: Tensor, target: Tensor) -> Tensor:
    """Mean KL divergence from the sibling's distribution."""
    return functional.kl_div(
        functional.log_softmax(logits.flatten(0, 1) / TEMPERATURE, dim=-1),
        functional.log_softmax(target.flatten(0, 1) / TEMPERATURE, dim=-1),
        log_target=True,
        reduction="batchmean",
    )


def optimizer_of(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW, faster for what the sibling does not have."""
    groups = []
    for kind, peak in PEAK.items():
        new = [p for name, p in named if (".mlp." in name) == (kind == "new")]
        groups.append({"params": new, "lr": peak, "peak": peak})
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.01)


def step(optimizer: torch.optim.Optimizer, loss: Tensor, done: float) -> None:
    """One step at a share of the time."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    for group in optimizer.param_groups:
        nn.utils.clip_grad_norm_(group["params"], 1.0)
        group["lr"] = group["peak"] * learning_rate(done)
    optimizer.step()


def train(model: Any, teacher: Any, ids: Tensor, minutes: float) -> None:
    """Train the decoder on a text and on what the dense sibling says about it."""
    optimizer = optimizer_of(list(model.named_parameters()))
    generator = torch.Generator().manual_seed(1)
    started, number = time.monotonic(), 0
    while (done := (time.monotonic() - started) / (60 * minutes)) < 1:
        window = batches(ids, generator)
        with torch.no_grad():
            target = teacher(window).logits
        out = model(window, output_router_logits=True)
        text = functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), window[:, 1:].flatten())
        loss = 0.3 * text + divergence(out.logits, target) + BALANCE * out.aux_loss
        step(optimizer, loss, done)
        if number % 50 == 0:
            click.echo(
                f"{number}: {100 * done:.0f} %, loss {loss.item():.3f}, text {text.item():.3f}"
            )
        number += 1


class MtpHead(nn.Module):
    """The head for multi-token prediction: norms, a projection, one layer with full attention."""

    def __init__(self, model: Any, weights: dict[str, Tensor]) -> None:
        """Take the layer's kind from the decoder, and all weights from `mtp.*` of `weights`."""
        super().__init__()
        config = model.config
        number = config.layer_types.index("full_attention")
        self.layer = type(model.model.layers[0])(config, number)
        self.rotary = model.model.rotary_emb
        norm = type(model.model.norm)
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        self.norms = nn.ModuleDict(
            {name: norm(config.hidden_size, config.rms_norm_eps) for name in names}
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        mine = {name.removeprefix("mtp."): value for name, value in weights.items()}
        self.layer.load_state_dict(
            {n.removeprefix("layers.0."): v for n, v in mine.items() if n.startswith("layers.0.")}
        )
        for name in names:
            self.norms[name].load_state_dict({"weight": mine[f"{name}.weight"]})
        self.fc.load_state_dict({"weight": mine["fc.weight"]})

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """[B, T, h] embeddings of the next tokens and trunk states to [B, T, h]."""
        joined = (
            self.norms["pre_fc_norm_embedding"](embeddings),
            self.norms["pre_fc_norm_hidden"](hidden),
        )
        x = self.fc(torch.cat(joined, dim=-1))
        positions = torch.arange(x.shape[1])[None]
        x = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions)
        normed: Tensor = self.norms["norm"](x)
        return normed

    def stored(self) -> dict[str, Tensor]:
        """Weights under the names of a checkpoint, experts fused."""
        named = {f"mtp.layers.0.{name}": w for name, w in self.layer.state_dict().items()}
        named |= {f"mtp.{name}": w for name, w in self.norms.state_dict().items()}
        return named | {"mtp.fc.weight": self.fc.weight.detach()}


def train_mtp(head: MtpHead, model: Any, ids: Tensor, minutes: float) -> None:
    """Train the head to predict the token after the next, with the decoder as it is."""
    optimizer = optimizer_of(list(head.named_parameters()))
    generator = torch.Generator().manual_seed(2)
    started, number = time.monotonic(), 0
    while (done := (time.monotonic() - started) / (60 * minutes)) < 1:
        window = batches(ids, generator)
        with torch.no_grad():
            hidden = model.model(window).last_hidden_state  # after the final norm
            embeddings = model.model.embed_tokens(window[:, 1:])
            greedy = model.lm_head(hidden).argmax(-1)
        predicted = model.lm_head(head(embeddings, hidden[:, :-1]))[:, :-1]
        loss = functional.cross_entropy(predicted.flatten(0, 1), greedy[:, 1:-1].flatten())
        step(optimizer, loss, done)
        if number % 50 == 0:
            agree = float((predicted.argmax(-1) == greedy[:, 1:-1]).float().mean())
            click.echo(
                f"mtp {number}: {100 * done:.0f} %, loss {loss.item():.3f}, agrees {agree:.3f}"
            )
        number += 1


def checkpoint_tensors(weights: dict[str, Tensor], nested: bool) -> dict[str, Tensor]:
    """Tensors as the checkpoints on the Hub store them."""
    stored: dict[str, Tensor] = {}
    for name, value in weights.items():
        if name == "lm_head.weight":
            continue  # tied
        wide = name.endswith(("A_log", "linear_attn.norm.weight"))
        data = value.detach().to(torch.float32 if wide else torch.bfloat16)
        fused = nested and not name.startswith("mtp.")
        if ".experts." in name and not fused:
            stored |= one_by_one(name, data)
        elif nested and not name.startswith("mtp."):
            stored["model.language_model." + name.removeprefix("model.")] = data.contiguous()
        else:
            stored[name] = data.contiguous()
    return stored


def one_by_one(name: str, data: Tensor) -> dict[str, Tensor]:
    """Tensors of every expert from one of all: `gate_up_proj` [E, 2I, h] or `down_proj`."""
    before, _, kind = name.rpartition(".")
    made = {}
    for number, expert in enumerate(data):
        parts = (
            dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            if kind == "gate_up_proj"
            else {kind: expert}
        )
        for part, weight in parts.items():
            made[f"{before}.{number}.{part}.weight"] = weight.clone()
    return made


def token_ids(folder: Path, text: Path) -> Tensor:
    """Tokens of a text, [tokens] int64."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    encoded = tokenizer.encode(text.read_text("utf-8"), add_special_tokens=False)
    return torch.tensor(encoded.ids)


@click.command()
@click.argument("text", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("sibling", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--minutes", default=12.0, show_default=True, help="Time for the decoder.")
@click.option("--mtp-minutes", default=3.0, show_default=True, help="Time for the MTP head.")
def main(text: Path, sibling: Path, out: Path, minutes: float, mtp_minutes: float) -> None:
    """Train a mixture of experts on TEXT from its dense SIBLING into the folder OUT."""
    torch.manual_seed(0)
    dense_config = json.loads((sibling / "config.json").read_text())
    config = expert_config(dense_config)
    nested = "text_config" in config
    dense = load_file(sibling / "model.safetensors")
    ids = token_ids(sibling, text)
    teacher = text_model(dense_config).eval()
    renamed = {n.replace("model.language_model.", "model."): w for n, w in dense.items()}
    load(teacher, renamed)
    weights = upcycle(dense, config)
    model = text_model(config)
    load(model, weights)
    train(model, teacher, ids, minutes)
    trained = dict(model.state_dict())
    if nested:
        head = MtpHead(model, {n: w for n, w in weights.items() if n.startswith("mtp.")})
        train_mtp(head, model.eval(), ids, mtp_minutes)
        trained |= head.stored()
    out.mkdir(parents=True, exist_ok=True)
    tensors = checkpoint_tensors(trained, nested)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in TOKENIZER_FILES:
        shutil.copyfile(sibling / name, out / name)


def load(model: Any, weights: dict[str, Tensor]) -> None:
    """Fill a decoder; the head is the embedding, and tensors of other parts are left out."""
    own = model.state_dict()
    found = {name: weights[name].float() for name in own if name in weights}
    found["lm_head.weight"] = found["model.embed_tokens.weight"]
    model.load_state_dict(found)


if __name__ == "__main__":
    main()
