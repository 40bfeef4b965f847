"""Export a packed folder to GGUF, open it in llama.cpp and compare the two engines.

pip install llama-cpp-python
lowbit-convert examples/models/tiny-qwen3 tiny-int4
python examples/check_llama_cpp.py tiny-int4

llama.cpp rounds activations to 8 bits before it multiplies them with Q4_0 and Q8_0 weights, so
logits differ a little; tokens of a greedy answer part where two candidates are nearly equal.
"""

import json
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path

import click
import torch

import lowbit.runtime
from lowbit.convert.export.export import export

STORIES = Path(__file__).parent / "data" / "stories-eval.txt"
PROMPT = "Once upon a time"


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--text", type=click.Path(path_type=Path), default=STORIES, help="Text to compare on."
)
@click.option("--tokens", default=512, show_default=True, help="Tokens of the text to compare on.")
@click.option("--new-tokens", default=48, show_default=True, help="Length of the greedy answer.")
def main(folder: Path, text: Path, tokens: int, new_tokens: int) -> None:
    """Compare llama.cpp's tokens and logits on FOLDER, exported to GGUF, with lowbit's."""
    try:
        from llama_cpp import Llama
    except ImportError:
        raise click.ClickException("llama-cpp-python is not installed") from None
    content = text.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as place:
        made = export(folder, Path(place) / "model", "gguf")
        theirs = Llama(
            str(made.folder / "model.gguf"), n_ctx=tokens + 64, logits_all=True, verbose=False
        )
        ours = lowbit.runtime.load(folder, device="cpu", dtype=torch.float32, context=tokens + 64)
        all_ids = ours.encode(content, raw=True)
        same_ids = theirs.tokenize(content.encode(), add_bos=False, special=True) == all_ids
        ids = all_ids[:tokens]
        theirs.eval(ids)
        a = torch.from_numpy(theirs.scores[: len(ids)].copy())
        b = ours.logits(ids).float().cpu()
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        theirs.reset()
        greedy = replace(ours.defaults, temperature=0.0)
        done = ours.generate(PROMPT, raw=True, sampling=greedy, max_new_tokens=new_tokens)
        answer = list(done.token_ids)
        told = theirs.generate(list(done.prompt_token_ids), temp=0.0, repeat_penalty=1.0)
        llama = list(islice(told, len(answer)))
    click.echo(
        json.dumps(
            {
                "proof": {"linears": made.proof.linears, "codes": made.proof.codes},
                "same_tokens_of_the_text": same_ids,
                "tokens": len(ids),
                "top1_agreement": (a.argmax(-1) == b.argmax(-1)).double().mean().item(),
                "largest_logit_difference": (a - b).abs().max().item(),
                "logit_spread": b.std().item(),
                "mean_kl": (q.exp() * (q - p)).sum(-1).mean().item(),
                "greedy_tokens_in_common": _common(answer, llama),
                "greedy_tokens": len(answer),
                "llama_cpp_says": theirs.detokenize(llama).decode(errors="replace"),
            },
            indent=2,
        )
    )


def _common(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


if __name__ == "__main__":
    main()
