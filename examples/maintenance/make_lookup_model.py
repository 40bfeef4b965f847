"""Write a small model that finds what stands far back in its text, to try long contexts with.

python examples/maintenance/make_lookup_model.py lookup
lowbit-convert lookup lookup-int4
lowbit-convert report lookup-int4 --long --eval-text examples/data/stories-eval.txt

Nothing is trained: the two layers of this Qwen3 are written by hand. The heads of the first bring
to every token codes of the four before it; the second finds the place whose four tokens before it
are the last four here, wherever that is, and the model predicts the token that stands there. It
knows no language: a text that does not repeat itself surprises it, so its perplexity means little.
The tokenizer is the bundled model's.
"""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import click
import torch
from safetensors.torch import save_file
from torch import Tensor

BUNDLED = Path(__file__).parents[1] / "models" / "tiny-qwen3"
V, H, D, HEADS = 4096, 512, 128, 4
THETA = 1e15
FAST = 20  # pairs of dimensions, which tell places apart
SLOW = range(22, D // 2)  # pairs that hardly turn in 32,768 positions, which hold codes
CODE = 2 * len(SLOW) // HEADS  # numbers of a token's code
# Parts of the hidden state: codes of a token and of those before it, the token itself, the
# prediction, and a one.
SELF, OUT, ONE = slice(128, 256), slice(256, 384), 384
NEAR, MATCH = 280.0, 60.0  # scores of the right place in the two layers
CERTAIN = 4.0  # logits of a match are 8 times that


def codes(place: int) -> slice:
    """Where the code of the token so many places before stands."""
    return slice(place * CODE, (place + 1) * CODE)


def weights() -> dict[str, Tensor]:
    """All tensors by name, FP32."""
    generator = torch.Generator().manual_seed(1)
    own = torch.randn(V, CODE, generator=generator).sign() / math.sqrt(CODE)
    tokens = torch.nn.functional.normalize(torch.randn(V, D, generator=generator), dim=1)
    embedding, head = torch.zeros(V, H), torch.zeros(V, H)
    embedding[:, codes(0)], embedding[:, SELF], embedding[:, ONE] = own, tokens, 1
    head[:, OUT] = CERTAIN * tokens
    found = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(H),
        "lm_head.weight": head,
    }
    for number, layer in enumerate((_bring_the_last_four(), _find_the_same_four())):
        shapes = {"mlp.gate_proj": (D, H), "mlp.up_proj": (D, H), "mlp.down_proj": (H, D)}
        layer |= {name: torch.zeros(shape) for name, shape in shapes.items()}
        layer |= {name: torch.ones(H) for name in ("input_layernorm", "post_attention_layernorm")}
        found |= {f"model.layers.{number}.{name}.weight": w for name, w in layer.items()}
    return found


def _bring_the_last_four() -> dict[str, Tensor]:
    """Heads that look 1, 2, 3 and 4 places back, whatever stands there."""
    q, k, v, o = (torch.zeros(HEADS * D, H) for _ in range(4))
    pairs = torch.arange(FAST)
    turns = THETA ** (-2 * pairs / D)
    for head in range(HEADS):
        first, back = head * D, head + 1
        q[first + pairs, ONE] = torch.cos(back * turns)
        q[first + D // 2 + pairs, ONE] = -torch.sin(back * turns)
        k[first + pairs, ONE] = 1
        v[first : first + CODE, codes(0)] = torch.eye(CODE)
        # The norm before the layer has made codes so much longer.
        o[first : first + CODE, codes(back)] = torch.eye(CODE) / math.sqrt(H / 3)
    return _attention(q, k, v, o, NEAR)


def _find_the_same_four() -> dict[str, Tensor]:
    """One head: codes of the last four tokens, beside those of the four before a place."""
    q, k, v, o = (torch.zeros(HEADS * D, H) for _ in range(4))
    rows = torch.tensor([*SLOW, *(pair + D // 2 for pair in SLOW)])
    columns = torch.arange(HEADS * CODE)
    q[rows, columns] = 1
    k[rows, columns + CODE] = 1
    v[:D, SELF] = torch.eye(D)
    o[:D, OUT] = torch.eye(D) / math.sqrt(H / 7)
    return _attention(q, k, v, o, MATCH)


def _attention(q: Tensor, k: Tensor, v: Tensor, o: Tensor, score: float) -> dict[str, Tensor]:
    """A layer's attention whose highest score is as given; norms make all q and k as long."""
    gain = torch.full((D,), math.sqrt(score / math.sqrt(D)))
    names = (f"self_attn.{x}_proj" for x in "qkvo")
    norms = {f"self_attn.{x}_norm": gain for x in "qk"}
    return {**dict(zip(names, (q, k, v, o.T.contiguous()), strict=True)), **norms}


def write(folder: Path, positions: int = 32_768) -> None:
    """Write the checkpoint with its tokenizer."""
    config: dict[str, Any] = json.loads((BUNDLED / "config.json").read_text("utf-8"))
    config |= {
        "vocab_size": V,
        "hidden_size": H,
        "intermediate_size": D,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": D,
        "max_position_embeddings": positions,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
        "tie_word_embeddings": False,
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    tensors = {name: w.to(torch.bfloat16) for name, w in weights().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED / name, folder / name)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=False))
@click.option("--positions", type=click.IntRange(64, 32_768), default=32_768, show_default=True)
def main(folder: Path, positions: int) -> None:
    """Write a model into FOLDER that finds what stands far back in its text."""
    write(folder, positions)


if __name__ == "__main__":
    main()
