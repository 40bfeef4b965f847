#!/bin/sh
# transformers: a tokenizer read from a GGUF splits <think> into pieces, and Hindi into five times the tokens.
#
# Guess before running: a GGUF says of each token if it is text, a control token or added by a user
#   (`tokenizer.ggml.token_type`), by which rule text is cut (`tokenizer.ggml.pre`) and which token ends an answer,
#   so `AutoTokenizer.from_pretrained(..., gguf_file=...)` gives the ids of the tokenizer that the file was made from.
# Seen: of the 26 added tokens of Qwen3 and Qwen3.5 three are known. The others become letters, though the file lists
#   them and their kinds. An empty thought, which Qwen3's template writes for an answer without thinking, is 17
#   tokens in place of 6, and marks of tool calls and pictures are split as well. Text is cut by the rule of another
#   model: Qwen3.5's by that of Qwen2, which ends a word at each vowel sign, and Llama 3's by that of GPT-2. A sentence
#   in Hindi has five times and twice as many tokens. The tokenizer's end is <|endoftext|> for Qwen3, whose file says
#   <|im_end|>, and the token that begins a text for Llama. Decoded, the text is right, so nothing shows. So a model
#   that is read from a GGUF gets a prompt that it was not trained on, and what is measured as the loss of its bits is
#   in part that of its tokens.
#
# Packages: transformers 5.17.0 with torch 2.13.0, gguf 0.19.0 (writes the files, with the keys that llama.cpp
#   writes). The merges are learned from the texts. The model's weights are set by hand: behind <think> it says y and
#   ends, and behind all else n.
# Output seen (tokens of the original tokenizer and of the one read from the file):
#   qwen3: 3 of 26 added tokens, empty thought 6 and 17, Hindi 40 and 40, numbers 18 and 18, end <|im_end|> and <|endoftext|>
#   qwen35: 3 of 26 added tokens, empty thought 6 and 17, Hindi 16 and 80, numbers 18 and 18, end <|im_end|> and <|im_end|>
#   llama: 5 of 5 added tokens, Hindi 40 and 78, numbers 10 and 12, end <|eot_id|> and <|begin_of_text|>
#   qwen3, greedy answer to <think>: y<|im_end|> and nnnnnnnn
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 transformers==5.17.0 accelerate==1.15.0 \
  gguf==0.19.0
cat > "$here/tokens.py" <<'PYTHON'
import inspect
import json
import sys
from pathlib import Path

import gguf
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import TikTokenConverter

torch.set_num_threads(1)
here = Path(sys.argv[1])
THOUGHT, NUMBERS = "<think>\n\n</think>\n\n", "print(123456)\n\nprint(123456)"
HINDI = "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।"
ENDS = "object_ref_start object_ref_end box_start box_end quad_start quad_end vision_start vision_end"
CONTROL = [f"<|{each}|>" for each in f"endoftext im_start im_end {ENDS} vision_pad image_pad video_pad".split()]
USER = [f"<|{each}|>" for each in ("fim_prefix", "fim_middle", "fim_suffix", "fim_pad", "repo_name", "file_sep")]
USER += [f"<{slash}{each}>" for each in ("tool_call", "tool_response", "think") for slash in ("", "/")]
LLAMA = [f"<|{each}|>" for each in ("begin_of_text", "end_of_text", "start_header_id", "end_header_id", "eot_id")]
SIZES = {"context_length": 64, "block_count": 1, "feed_forward_length": 4, "attention.head_count": 1}
SIZES |= {"attention.head_count_kv": 1, "attention.key_length": 128}
SSM = {"conv_kernel": 4, "state_size": 8, "group_count": 1, "time_step_rank": 1, "inner_size": 8}
DELTA = {f"ssm.{key}": value for key, value in SSM.items()} | {"full_attention_interval": 4, "rope.dimension_count": 32}


def learn(normalizer, cut, control, user, end):
    """A byte-level tokenizer whose merges are learned from the texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, cut
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=letters, show_progress=False)
    tokenizer.train_from_iterator([HINDI, NUMBERS] * 9, trainer)
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in user])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)


def write(architecture, rule, tokenizer, control, user, sizes, tensors):
    """A GGUF of the tokenizer and the tensors."""
    file = gguf.GGUFWriter(here / "x.gguf", architecture)
    for key, value in sizes.items():
        file.add_uint32(f"{architecture}.{key}", value)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_rope_freq_base(1e4)
    file.add_rope_dimension_sections([11, 11, 10, 0])
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre(rule)
    tokens, kinds = tokenizer.convert_ids_to_tokens(range(len(tokenizer))), gguf.TokenType
    file.add_token_list(tokens)
    known = dict.fromkeys(control, kinds.CONTROL) | dict.fromkeys(user, kinds.USER_DEFINED)
    file.add_token_types([known.get(each, kinds.NORMAL) for each in tokens])
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    file.add_token_merges([" ".join(pair) for pair in merges])
    file.add_bos_token_id(tokenizer.convert_tokens_to_ids(control[0]))
    file.add_eos_token_id(tokenizer.eos_token_id)
    for name, tensor in tensors.items():
        file.add_tensor(name, tensor.numpy())
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()


def chain(tokenizer):
    """A Qwen3 that knows the last token alone, with the names of GGUF."""
    n = len(tokenizer)
    sizes = {"vocab_size": n, "hidden_size": n, "intermediate_size": 4, "num_hidden_layers": 1, "head_dim": 128}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": False}
    state = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **heads)).state_dict()
    state = {name: torch.ones(each.shape) * ("norm" in name) for name, each in state.items()}
    state["model.embed_tokens.weight"] = torch.eye(n)
    yes, no, think = tokenizer.convert_tokens_to_ids(["y", "n", "<think>"])
    state["lm_head.weight"][no] = 1
    state["lm_head.weight"][yes, think] = state["lm_head.weight"][tokenizer.eos_token_id, yes] = 2
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
    return {names.get_name(name, try_suffixes=(".weight",)): each for name, each in state.items()}


pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default  # Llama 3's
bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
rules = {"llama": (None, pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_of]))}
for name, each in (("qwen3", transformers.Qwen2Tokenizer()), ("qwen35", transformers.Qwen3_5Tokenizer())):
    rules[name] = each.backend_tokenizer.normalizer, each.backend_tokenizer.pre_tokenizer
for name, rule, control, user, end, more, seen in (
    ("qwen3", "qwen2", CONTROL, USER, "<|im_end|>", {}, (3, "<|endoftext|>", (6, 17), (40, 40), (18, 18))),
    ("qwen35", "qwen35", CONTROL, USER, "<|im_end|>", DELTA, (3, "<|im_end|>", (6, 17), (16, 80), (18, 18))),
    ("llama", "llama-bpe", LLAMA, [], "<|eot_id|>", {}, (5, "<|begin_of_text|>", (40, 78), (10, 12))),
):
    tokenizer = learn(*rules[name], control, user, end)
    weights = chain(tokenizer) if name == "qwen3" else {"token_embd.weight": torch.zeros(len(tokenizer), 32)}
    write(name, rule, tokenizer, control, user, {**SIZES, **more, "embedding_length": len(tokenizer)}, weights)
    found = transformers.AutoTokenizer.from_pretrained(here, gguf_file="x.gguf")
    whole = sum(len(found(each)["input_ids"]) == 1 for each in control + user)
    texts = {"empty thought": THOUGHT, "Hindi": HINDI, "numbers": NUMBERS}
    if not user:
        del texts["empty thought"]
    counts = {key: (len(tokenizer(text)["input_ids"]), len(found(text)["input_ids"])) for key, text in texts.items()}
    shown = ", ".join(f"{key} {a} and {b}" for key, (a, b) in counts.items())
    print(f"{name}: {whole} of {len(control + user)} added tokens, {shown}, end {end} and {found.eos_token}")
    assert (whole, found.eos_token, *counts.values()) == seen
    assert all(found.decode(tokenizer(text)["input_ids"]) == text for text in texts.values())
    if name == "qwen3":
        model, answers = transformers.AutoModelForCausalLM.from_pretrained(here, gguf_file="x.gguf"), []
        for each in (tokenizer, found):
            ids = each("<think>", return_tensors="pt").input_ids
            made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False)
            answers.append(found.decode(made[0, ids.shape[1] :]))
print("qwen3, greedy answer to <think>:", " and ".join(answers))
assert answers == ["y<|im_end|>", "nnnnnnnn"]
PYTHON
"$here/venv/bin/python" -W ignore "$here/tokens.py" "$here" 2> "$here/said" || (cat "$here/said" && exit 1)
echo "as stated"
