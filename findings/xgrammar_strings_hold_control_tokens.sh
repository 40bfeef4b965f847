#!/bin/sh
# xgrammar: a JSON string may hold control tokens, so that a constrained answer ends in the middle of it.
#
# Guess before running: a grammar allows text, and a control token is none, though it has a spelling. So no string
#   takes <|im_start|> or <|endoftext|> as a token, in xgrammar as in llguidance; <tool_call>, which is added to the
#   vocabulary but not special, is taken by both as the text that it spells.
# Seen: xgrammar reads each added token as its spelling, special or not, and masks those alone that it was told to
#   be ends; from a tokenizer it takes one. llguidance takes none of them. Models of Qwen end with either of two
#   tokens. A model that wants to stop within a string may not, and says the other end instead: generation stops
#   and leaves half a string, which no parser reads. Where the grammar knows both ends, it says the next control
#   token: the text parses once such tokens are left out, but the context opens a turn within a string. With
#   llguidance it finishes its string. So it depends on how many ends a grammar was told if an answer is JSON.
#
# Packages: xgrammar 0.2.9, llguidance 1.9.1, transformers 5.17.0 with torch 2.13.0. The model's weights are set by
#   hand: behind c it wants to end, in the order of the tokens below, and otherwise goes on with d and a quotation
#   mark. transformers stops at both ends, as Qwen3's generation_config.json says.
# Output seen (a string as schema; what may follow "abc, and the greedy answer):
#   llguidance: no added token; "abcd"<|im_end|>, which is JSON
#   xgrammar: <|endoftext|> <|im_start|> <tool_call>; "abc<|endoftext|>, which is no JSON
#   xgrammar, told of both ends: <|im_start|> <tool_call>; "abc<|im_start|>d"<|im_end|>, which is JSON without its control tokens
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 xgrammar==0.2.9 \
  llguidance==1.9.1
cat > "$here/strings.py" <<'PYTHON'
import json

import llguidance.hf
import llguidance.numpy
import numpy as np
import torch
import xgrammar
import xgrammar.contrib.hf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

torch.set_num_threads(1)
SCHEMA, SPECIAL, ADDED = '{"type": "string"}', ("<|im_end|>", "<|endoftext|>", "<|im_start|>"), "<tool_call>"
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
bytewise = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = decoders.ByteLevel()
bytewise.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in SPECIAL])
bytewise.add_tokens([AddedToken(ADDED, special=False, normalized=False)])
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token=SPECIAL[0])
V, ID = len(tokenizer), bytewise.token_to_id
ENDS = [ID(each) for each in SPECIAL[:2]]

end = {token: 5 - i for i, token in enumerate((*SPECIAL, ADDED, "d"))}
followers = {'"': {"a": 3}, "a": {"b": 3}, "b": {"c": 3}, "c": end, "d": {'"': 3}}
followers |= {token: {"d": 3} for token in (SPECIAL[2], ADDED)}
sizes = {"vocab_size": V, "hidden_size": V, "intermediate_size": 4, "head_dim": 4, "num_hidden_layers": 1}
heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False, "eos_token_id": ENDS}
model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).eval()
with torch.no_grad():
    for each in model.parameters():
        each.zero_()
    model.model.norm.weight.fill_(V**-0.5)  # a token is a unit vector, and so it is normalized
    model.model.embed_tokens.weight.copy_(torch.eye(V))
    for token, logits in followers.items():
        for follower, logit in logits.items():
            model.lm_head.weight[ID(follower), ID(token)] = logit


class OfLlguidance:
    """A logits processor like xgrammar's own."""

    def __init__(self):
        converted = llguidance.hf.from_tokenizer(tokenizer, n_vocab=V, eos_token=ENDS[0])
        grammar = llguidance.LLMatcher.grammar_from_json_schema(SCHEMA)
        self.matcher, self.begun = llguidance.LLMatcher(converted, grammar), False

    def __call__(self, ids, scores):
        if self.begun:
            assert self.matcher.consume_token(int(ids[0, -1]))
        self.begun = True
        words = llguidance.numpy.allocate_token_bitmask(1, V)
        llguidance.numpy.fill_next_token_bitmask(self.matcher, words, 0)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:V].astype(bool)
        return scores.masked_fill(~torch.from_numpy(allowed), -torch.inf)


def of_xgrammar(ends):
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=V, stop_token_ids=ends)
    grammar = xgrammar.GrammarCompiler(info, max_threads=1).compile_json_schema(SCHEMA)
    return xgrammar.contrib.hf.LogitsProcessor(grammar)


def following(processor, text):
    """Added tokens that may follow a text."""
    ids = torch.tensor([[ID("x")]])
    for letter in [*text, None]:
        scores = processor(ids, torch.zeros(1, V))
        if letter:
            ids = torch.cat([ids, torch.tensor([[ID(letter)]])], 1)
    return [each for each in (*SPECIAL, ADDED) if scores[0, ID(each)] == 0]


def is_json(text):
    try:
        json.loads(text)
    except json.JSONDecodeError:
        return False
    return True


ways = {
    "llguidance": OfLlguidance,
    "xgrammar": lambda: of_xgrammar(None),
    "xgrammar, told of both ends": lambda: of_xgrammar(ENDS),
}
for name, make in ways.items():
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": ENDS[1], "logits_processor": [make()]}
    found = model.generate(torch.tensor([[ID("x")]]), **options)[0, 1:]
    text, bare = tokenizer.decode(found), tokenizer.decode(found, skip_special_tokens=True)
    kind = "JSON" if is_json(bare) else "no JSON"
    if kind == "JSON" and text != bare + SPECIAL[0]:
        kind += " without its control tokens"
    allowed = " ".join(following(make(), '"abc')) or "no added token"
    print(f"{name}: {allowed}; {text}, which is {kind}")
PYTHON
"$here/venv/bin/python" -W ignore "$here/strings.py" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
