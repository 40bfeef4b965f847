#!/bin/sh
# mlx-lm: a bounded cache keeps the first four tokens for an answer, not for its prompt, and not in a batch.
#
# Guess before running: `max_kv_size` is one bound: each token sees the first four and the latest ones, as the
#   rotating cache keeps them. How many tokens of a prompt are taken at a time changes speed and memory, not the
#   answer, and an answer is the same alone and in a batch, as both hold without the bound.
# Seen: the cache keeps the four, but the mask of a step of several tokens is a plain window over what is kept, and
#   hides them from all but the first tokens of the step. So a prompt is read through a window, and the answer with
#   the first four; only a step of one token reads both alike, and steps of 2 or 32 give numbers of their own. A
#   batch does not keep the four at all. One bound is three models that equal dense attention, each with a mask of
#   its own, and others between them; nothing says which. So a bound that was found good in one of these ways says
#   nothing of the others, and generating without end, for which the four are kept, loses them in a batch.
#
# Packages: mlx-lm 0.32.2 with MLX 0.32.4 (its CPU backend for Linux), numpy 2.4.6. A Qwen3 with weights by chance.
# Output seen (200 tokens, a bound of 32; largest difference of log probabilities to dense attention that sees the
# first tokens always, for the answer only, or never):
#   alone, 1 at a time: first tokens always kept 0.0, for the answer 1.5, never 2.9
#   alone, 2 at a time: first tokens always kept 0.5, for the answer 1.3, never 3.4
#   alone, 32 at a time: first tokens always kept 1.2, for the answer 0.4, never 3.4
#   alone, 2048 at a time: first tokens always kept 1.5, for the answer 0.0, never 3.3
#   in a batch, 1 at a time: first tokens always kept 2.9, for the answer 3.3, never 0.0
#   in a batch, 2048 at a time: first tokens always kept 2.9, for the answer 3.3, never 0.0
#   without a bound: alone 1 and 2048 at a time 0.0, in a batch 0.0
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet numpy==2.4.6 transformers==5.17.0 "mlx[cpu]==0.32.4"
"$here/venv/bin/python" -m pip install --quiet --no-deps mlx-lm==0.32.2
cat > "$here/bound.py" <<'PYTHON'
import mlx.core as mx
import numpy as np
from mlx.utils import tree_map
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.qwen3 import Model, ModelArgs

mx.set_default_device(mx.cpu)
mx.random.seed(0)
BOUND, FIRST, PROMPT = 32, 4, 200
sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "head_dim": 32, "num_hidden_layers": 3}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
others = {"rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 4096}
model = Model(ModelArgs.from_dict({"model_type": "qwen3"} | sizes | heads | others))
model.update(
    tree_map(lambda w: mx.ones(w.shape) if w.ndim == 1 else 0.15 * mx.random.normal(w.shape), model.parameters())
)
prompt = np.random.default_rng(0).integers(0, 64, PROMPT).tolist()


def dense(sees):
    """Log probabilities behind the prompt where token i sees token j as `sees` says."""
    i, j = np.arange(PROMPT)[:, None], np.arange(PROMPT)[None]
    x, mask = model.model.embed_tokens(mx.array(prompt)[None]), mx.array((j <= i) & sees(i, j))
    for layer in model.model.layers:
        x = layer(x, mask, None)
    logits = model.lm_head(model.model.norm(x))[0, -1]
    return logits - mx.logsumexp(logits)


def alone(step, bound=BOUND):
    options = {"max_tokens": 1, "max_kv_size": bound, "prefill_step_size": step}
    [(_, found)] = generate_step(mx.array(prompt), model, **options)
    return found


def in_batch(step, bound=BOUND):
    batch = BatchGenerator(model, stop_tokens=None, max_kv_size=bound, prefill_step_size=step)
    batch.insert([prompt], max_tokens=[1])
    return batch.next_generated()[0].logprobs


def off(found, exact):
    return mx.abs(found - exact).max().item()


def in_window(i, j):
    return i - j < BOUND


def kept(i, j):
    return (j < FIRST) | (i - j < BOUND - FIRST)


masks = {
    "always kept": dense(kept),
    "for the answer": dense(lambda i, j: np.where(i == PROMPT - 1, kept(i, j), in_window(i, j))),
    "never": dense(in_window),
}
for name, way, steps in (("alone", alone, (1, 2, 32, 2048)), ("in a batch", in_batch, (1, 2048))):
    for step in steps:
        shown = ", ".join(f"{mask} {off(way(step), exact):.1f}" for mask, exact in masks.items())
        print(f"{name}, {step} at a time: first tokens {shown}")
assert max(off(alone(1), masks["always kept"]), off(alone(2048), masks["for the answer"])) < 1e-3
assert max(off(in_batch(step), masks["never"]) for step in (1, 2048)) < 1e-3
exact = dense(lambda i, j: j <= i)
of_one, of_all, of_batch = (off(way(step, None), exact) for way, step in ((alone, 1), (alone, 2048), (in_batch, 2048)))
assert max(of_one, of_all, of_batch) < 1e-3
print(f"without a bound: alone 1 and 2048 at a time {max(of_one, of_all):.1f}, in a batch {of_batch:.1f}")
PYTHON
"$here/venv/bin/python" -W ignore "$here/bound.py" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
