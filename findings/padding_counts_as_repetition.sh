#!/bin/sh
# transformers: padding counts as repetition, so that a padded prompt's answer does not end.
#
# Guess before running: padding has 0 in the attention mask and is no part of a prompt, so that a prompt gets
#   the same greedy tokens alone and beside a longer one, with a repetition penalty as without, whichever
#   token pads.
# Seen: the penalty reads the tokens and not the mask. Padding is the end token where a tokenizer has none of
#   its own, and one of the end tokens of Qwen3 and Qwen3.5. So in every row but the longest the end counts as
#   said before the answer begins: an answer of three tokens goes on to the limit. `no_repeat_ngram_size=1`
#   forbids the end altogether. Alone, beside a prompt of its own length, or padded with another token, the
#   answer ends. So it depends on its company, and an evaluation with a penalty on the batch size.
#
# Packages: transformers 5.17.0 with torch 2.13.0. The model's weights are set by hand: the next letter has the
#   logit 3, and behind e the end has 4.
# Output seen (answers to abc; . is the end, and 12 tokens are the limit):
#   no penalty: alone de., beside ghi de., beside ghijkl de., padded with another token de.
#   repetition_penalty 1.5: alone de., beside ghi de., beside ghijkl defghijklmno, padded with another token de.
#   no_repeat_ngram_size 1: alone de., beside ghi de., beside ghijkl defghijklmno, padded with another token de.
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0
cat > "$here/padding.py" <<'PYTHON'
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
LETTERS = "abcdefghijklmnopqrstuvwxyz._"
END, OTHER = LETTERS.index("."), LETTERS.index("_")
sizes = {"vocab_size": 28, "hidden_size": 28, "intermediate_size": 4, "head_dim": 4, "num_hidden_layers": 1}
heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False, "eos_token_id": END}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
with torch.no_grad():
    for each in model.parameters():
        each.zero_()
    model.model.norm.weight.fill_(28**-0.5)  # a letter is a unit vector, and so it is normalized
    model.model.embed_tokens.weight.copy_(torch.eye(28))
    for i in range(25):
        model.lm_head.weight[i + 1, i] = 3
    model.lm_head.weight[END, LETTERS.index("e")] = 4


def answer(prompts, pad, **options):
    """Letters that the first prompt gets."""
    length = max(map(len, prompts))
    ids = torch.tensor([[pad] * (length - len(each)) + [LETTERS.index(letter) for letter in each] for each in prompts])
    mask = torch.tensor([[0] * (length - len(each)) + [1] * len(each) for each in prompts])
    options |= {"max_new_tokens": 12, "do_sample": False, "pad_token_id": pad}
    found = model.generate(ids, attention_mask=mask, **options)[0, length:].tolist()
    text = "".join(LETTERS[i] for i in found)
    return text.split(".")[0] + "." * ("." in text)


pair = ["abc", "ghijkl"]
ways = {
    "no penalty": {},
    "repetition_penalty 1.5": {"repetition_penalty": 1.5},
    "no_repeat_ngram_size 1": {"no_repeat_ngram_size": 1},
}
for name, options in ways.items():
    alone, padded, other = (answer(*each, **options) for each in ((pair[:1], END), (pair, END), (pair, OTHER)))
    equal = answer(["abc", "ghi"], END, **options)
    print(f"{name}: alone {alone}, beside ghi {equal}, beside ghijkl {padded}, padded with another token {other}")
    assert alone == equal == other == "de."
    assert padded == ("de." if name == "no penalty" else "defghijklmno")
PYTHON
"$here/venv/bin/python" -W ignore "$here/padding.py" 2> "$here/said" || (cat "$here/said" && exit 1)
echo "as stated"
