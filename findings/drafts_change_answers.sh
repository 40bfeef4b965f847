#!/bin/sh
# transformers and mlx-lm: drafts change a greedy answer that has a stop string, guidance or a penalty.
#
# Guess before running: drafts that a model checks change its speed and not its greedy answer, whatever else the
#   request asks for; surely so where the model is its own draft.
# Seen: transformers looks for a stop string at the end of what was accepted. Where it lies within a run of
#   accepted drafts it is passed by, with nine drafts to the limit. Guidance keeps a cache of its own, into which
#   every draft goes, accepted or not, so that the answer is another from the sixth letter on. mlx-lm's penalties
#   see of the prompt, where drafts are made, only its last token: the answer repeats the prompt as if there were
#   no penalty. Without such options every answer is equal, so that the usual test of speculation passes. Who
#   measures it with the options of a real request compares two answers, of two lengths.
#
# Packages: transformers 5.17.0 with torch 2.13.0, mlx-lm 0.32.2 with MLX 0.32.4 (its CPU backend for Linux). The
#   models' weights are set by hand, one's by chance and in FP64; transformers drafts from the prompt.
# Output seen:
#   transformers, stop at cd, 0 drafts: abcd
#   transformers, stop at cd, 2 drafts: abcdefghijabcd
#   transformers, stop at cd, 4 drafts: abcd
#   transformers, stop at cd, 6 drafts: abcdefghijabcd
#   transformers, stop at cd, 9 drafts: abcdefghijabcdefghijabcdefghijabcdefghij
#   transformers, guidance 1: by definition upehvupefwigxvzpefwigxya, 0 drafts upehvupefwigxvzpefwigxya, 4 drafts upehvupefwigxvzpefwigxya
#   transformers, guidance 1.5: by definition upehvupehvupefkupefwigxy, 0 drafts upehvupehvupefkupefwigxy, 4 drafts upehvzpefwigxyafwigxyafw
#   mlx-lm, penalty None: 0 drafts defghi, 1 drafts defghi, 3 drafts defghi
#   mlx-lm, penalty 1.5: 0 drafts pqrstu, 1 drafts defghi, 3 drafts defghi
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 "mlx[cpu]==0.32.4"
"$here/venv/bin/python" -m pip install --quiet --no-deps mlx-lm==0.32.2
cat > "$here/drafts.py" <<'PYTHON'
import mlx.core as mx
import torch
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.models.qwen3 import Model, ModelArgs
from mlx_lm.sample_utils import make_logits_processors
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
mx.set_default_device(mx.cpu)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
vocabulary = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
vocabulary.decoder = decoders.Fuse()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary)
sizes = {"vocab_size": 26, "hidden_size": 26, "intermediate_size": 4, "head_dim": 4, "num_hidden_layers": 1}
heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}


def prompted(text):
    return tokenizer(text, return_tensors="pt").input_ids


def of_transformers(logits):
    """A model whose next letter depends on the last one alone."""
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads, eos_token_id=25, pad_token_id=25)).eval()
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
        model.model.norm.weight.fill_(26**-0.5)  # a letter is a unit vector, and so it is normalized
        model.model.embed_tokens.weight.copy_(torch.eye(26))
        model.lm_head.weight.copy_(logits)
    return model


def of_mlx(logits):
    """The same in MLX."""
    others = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "rope_theta": 1e4}
    model = Model(ModelArgs(**sizes, **heads, **others))
    for layer in model.layers:
        for block in (layer.self_attn.o_proj, layer.mlp.down_proj):
            block.weight = mx.zeros_like(block.weight)
    model.model.norm.weight = mx.full((26,), 26**-0.5)
    model.model.embed_tokens.weight = mx.eye(26)
    model.lm_head.weight = mx.array(logits.numpy())
    return model


# a stop string; the model goes round ten letters
circle = torch.zeros(26, 26)
for i in range(10):
    circle[(i + 1) % 10, i] = 3
model, prompt = of_transformers(circle), "abcdefghij" * 2
for count in (0, 2, 4, 6, 9):
    options = {"prompt_lookup_num_tokens": count} if count else {}
    options |= {"max_new_tokens": 40, "do_sample": False, "stop_strings": ["cd"], "tokenizer": tokenizer}
    found = model.generate(prompted(prompt), **options)[0, len(prompt) :]
    print(f"transformers, stop at cd, {count} drafts: {tokenizer.decode(found)}")

# guidance, which looks at the context; FP64, so that no two logits are next to each other
torch.manual_seed(0)
wide = sizes | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32}
model = Qwen3ForCausalLM(Qwen3Config(**wide, **heads)).double().eval()
prompt = prompted("abcabcab")


def guided(scale, tokens):
    """The answer by definition: the model with the prompt, less the model with its last letter."""
    ids = prompt
    for _ in range(tokens):
        with torch.no_grad():
            given, bare = (model(each).logits[0, -1].log_softmax(-1) for each in (ids, ids[:, prompt.shape[1] - 1 :]))
        ids = torch.cat([ids, (bare + scale * (given - bare)).argmax()[None, None]], 1)
    return ids[0, prompt.shape[1] :]


for scale in (1, 1.5):
    options = {"max_new_tokens": 24, "do_sample": False, "guidance_scale": scale, "pad_token_id": 25}
    answers = {"by definition": guided(scale, 24)}
    for count in (0, 4):
        drafts = {"prompt_lookup_num_tokens": count} if count else {}
        answers[f"{count} drafts"] = model.generate(prompt, **options, **drafts)[0, prompt.shape[1] :]
    shown = ", ".join(f"{name} {tokenizer.decode(each)}" for name, each in answers.items())
    print(f"transformers, guidance {scale}: {shown}")

# a penalty; the next letter has 4, the one 13 behind it 3
pairs = torch.zeros(26, 26)
for i in range(26):
    pairs[(i + 1) % 26, i], pairs[(i + 13) % 26, i] = 4, 3
model, prompt = of_mlx(pairs), mx.array(prompted("abcdefghabc")[0].numpy())
for penalty in (None, 1.5):
    processors = make_logits_processors(repetition_penalty=penalty)
    options = {"max_tokens": 6, "logits_processors": processors}
    found = {0: [each[0] for each in generate_step(prompt, model, **options)]}
    for count in (1, 3):
        steps = speculative_generate_step(prompt, model, model, num_draft_tokens=count, **options)
        found[count] = [each[0] for each in steps]
    shown = ", ".join(f"{count} drafts {''.join(LETTERS[i] for i in each)}" for count, each in found.items())
    print(f"mlx-lm, penalty {penalty}: {shown}")
PYTHON
"$here/venv/bin/python" -W ignore "$here/drafts.py" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
