#!/bin/sh
# Chat templates: llama.cpp shows a model six digits of the numbers in its own tool calls, and -1 for 2^64 - 1.
#
# Guess before running: `tools | tojson` is one text with transformers, minijinja and llama.cpp, as models are trained on
#   such prompts: the same order, spaces and letters, 1.0 stays 1.0, and 1e-7 and big integers stay what they are.
# Seen: llama.cpp reads the arguments of a past call and writes them again, though Qwen3's template would take their text.
#   A number with a fraction keeps six digits: here a position is off by a metre, an amount by two and a time by an
#   hour. 1.0 becomes 1. Integers from 2^63 on turn negative, in a schema too. minijinja keeps all numbers, but writes
#   0.00001 for 1e-05 and \u003c for <, so too for >, & and '. transformers gives the request's text. llama.cpp's own
#   answers keep all digits (tried apart, as was Qwen3's template), so that an agent reads in its calls what it never
#   said, in one engine and not in another.
#
# Packages: xllamacpp 2026.10.11549 (llama.cpp's server; the model's weights are zeros), gguf 0.19.0 (writes its file),
#   minijinja 3.1.0, transformers 5.17.0. The template asks for text first, as Qwen3's does.
# Output seen (a schema, and the arguments of a call):
#   the request: {"type": "integer", "maximum": 18446744073709551615, "multipleOf": 1e-05, "default": 1.0}
#   the request: {"latitude": 52.5200066, "amount": 1234567.89, "time": 1767225600.5, "share": 1.0, "id": 12345678901234567890, "if": "a < b"}
#   transformers: {"type": "integer", "maximum": 18446744073709551615, "multipleOf": 1e-05, "default": 1.0}
#   transformers: {"latitude": 52.5200066, "amount": 1234567.89, "time": 1767225600.5, "share": 1.0, "id": 12345678901234567890, "if": "a < b"}
#   minijinja: {"type": "integer", "maximum": 18446744073709551615, "multipleOf": 0.00001, "default": 1.0}
#   minijinja: {"latitude": 52.5200066, "amount": 1234567.89, "time": 1767225600.5, "share": 1.0, "id": 12345678901234567890, "if": "a \u003c b"}
#   llama.cpp: {"type": "integer", "maximum": -1, "multipleOf": 1e-05, "default": 1}
#   llama.cpp: {"latitude": 52.52, "amount": 1.23457e+06, "time": 1.76723e+09, "share": 1, "id": -6101065172474983726, "if": "a < b"}
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet numpy==2.4.6 gguf==0.19.0 transformers==5.17.0 jinja2==3.1.6 minijinja==3.1.0 \
  xllamacpp==2026.10.11549
cat > "$here/render.py" <<'PYTHON'
import json
import sys
import urllib.request
from pathlib import Path

import gguf
import minijinja
import numpy as np
import xllamacpp
from transformers.utils.chat_template_utils import render_jinja_template

ARGUMENTS = '{"latitude": 52.5200066, "amount": 1234567.89, "time": 1767225600.5, "share": 1.0, '
ARGUMENTS += '"id": 12345678901234567890, "if": "a < b"}'
SCHEMA = '{"type": "integer", "maximum": 18446744073709551615, "multipleOf": 1e-05, "default": 1.0}'
TEMPLATE = """{% for tool in tools or [] %}{{ tool.function.parameters | tojson }}
{% endfor %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}
{{ call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def write(path):
    """A Qwen3 of one layer, whose tokens are bytes and whose weights are zeros."""
    file = gguf.GGUFWriter(path, "qwen3")
    sizes = {"context_length": 512, "block_count": 1, "embedding_length": 32, "feed_forward_length": 32}
    heads = {"head_count": 1, "head_count_kv": 1, "key_length": 32, "value_length": 32}
    for name, size in (sizes | {f"attention.{name}": size for name, size in heads.items()}).items():
        file.add_uint32(f"qwen3.{name}", size)
    file.add_layer_norm_rms_eps(1e-6)
    file.add_tokenizer_model("gpt2")
    file.add_tokenizer_pre("qwen2")
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [*map(chr, plain), *(chr(256 + i) for i in range(256 - len(plain)))]
    file.add_token_list([*letters, "<|im_end|>"])
    file.add_token_types([gguf.TokenType.NORMAL] * 256 + [gguf.TokenType.CONTROL])
    file.add_token_merges(["a b"])
    file.add_eos_token_id(256)
    file.add_chat_template(TEMPLATE)
    block = {f"attn_{name}": (32, 32) for name in ("q", "k", "v", "output")}
    block |= {f"ffn_{name}": (32, 32) for name in ("gate", "up", "down")}
    block |= {name: (32,) for name in ("attn_norm", "ffn_norm", "attn_q_norm", "attn_k_norm")}
    shapes = {f"blk.0.{name}": shape for name, shape in block.items()}
    for name, shape in (shapes | {"token_embd": (257, 32), "output_norm": (32,)}).items():
        file.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    for step in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        step()


def request(arguments):
    """A conversation with a call, and the tool, as an API takes them."""
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "0", "content": "!"})
    function = {"name": "f", "description": "f", "parameters": json.loads(SCHEMA)}
    return {"messages": messages, "tools": [{"type": "function", "function": function}]}


def by_llama(path):
    options = xllamacpp.CommonParams()
    options.model.path, options.n_ctx, options.n_parallel, options.cpuparams.n_threads = path, 512, 1, 1
    options.warmup, options.use_jinja = False, True
    server = xllamacpp.Server(options)
    body, kind = json.dumps(request(ARGUMENTS)).encode(), {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{server.listening_address}/apply-template", body, kind)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["prompt"]


def by_transformers(arguments):
    given = request(arguments)
    return render_jinja_template([given["messages"]], given["tools"], chat_template=TEMPLATE)[0][0]


path = str(Path(sys.argv[1]) / "x.gguf")
write(path)
parsed = json.loads(ARGUMENTS)
rendered = {
    "the request": f"{SCHEMA}\n<tool_call>f\n{ARGUMENTS}\n",
    "transformers": by_transformers(parsed),
    "minijinja": minijinja.Environment().render_str(TEMPLATE, **request(parsed)),
    "llama.cpp": by_llama(path),
}
assert by_transformers(ARGUMENTS) == rendered["transformers"]
for name, text in rendered.items():
    arguments = text.split("<tool_call>f\n")[1].split("\n")[0]
    print(f"{name}: {text.splitlines()[0]}\n{name}: {arguments}")
PYTHON
"$here/venv/bin/python" -W ignore "$here/render.py" "$here" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n 's/^#   \(the request\|transformers\|minijinja\|llama\.cpp\)\(.*: {.*\)$/\1\2/p' "$0" | diff - "$here/seen"
echo "as stated"
