#!/bin/sh
# Grammars of JSON schemas: a bound takes away values that it allows, such as 1e-7 and a line break.
#
# Guess before running: a bound of a JSON schema takes away the values beyond it and no others: "minimum": 0
#   leaves 1e-7 as it was, a least length leaves line breaks and quotation marks, and the limits of 64-bit
#   integers, which generators of schemas write, are kept to the last digit.
# Seen: a number with a bound becomes a pattern of digits. In xgrammar it has no exponent and six decimals,
#   so that nothing lies between 0 and 0.000001; in llguidance it has no exponent. A string with a length or a
#   pattern holds nothing in xgrammar that JSON must escape: no line break, tab, quotation mark, backslash.
#   llguidance's bounds pass through FP64: 2^53 + 1 and 2^64 - 1 are lost as values of their own maximum, and
#   -2^63 as a minimum fails the schema; xgrammar fails 2^64 - 1. outlines-core keeps all, as it reads no bounds
#   of numbers. So a constrained answer can be wrong where the model was right (a learning rate of 1e-7 as
#   0.000001, code on one line), and one request has other answers in engines with other grammars.
#
# Packages: xgrammar 0.2.9, llguidance 1.9.1, outlines-core 0.2.14; jsonschema 4.26.0 agrees with every value.
# Output seen:
#   number: xgrammar keeps all, llguidance keeps all, outlines-core keeps all
#   number, minimum 0: xgrammar loses 0.0000001, 1e-7, llguidance loses 1e-7, outlines-core keeps all
#   number, maximum 3.402823669209385e+38: xgrammar loses 0.0000001, 1e-7, llguidance fails, outlines-core keeps all
#   string: xgrammar keeps all, llguidance keeps all, outlines-core keeps all
#   string, minLength 1: xgrammar loses "a\nb", "a\tb", "a\"b", "a\\b", llguidance keeps all, outlines-core keeps all
#   string, pattern ^[^x]*$: xgrammar loses "a\nb", "a\tb", "a\"b", "a\\b", llguidance keeps all, outlines-core keeps all
#   integer: xgrammar keeps all, llguidance keeps all, outlines-core keeps all
#   integer, minimum -9223372036854775808: xgrammar keeps all, llguidance fails, outlines-core keeps all
#   integer, maximum 9007199254740993: xgrammar keeps all, llguidance loses 9007199254740993, outlines-core keeps all
#   integer, maximum 18446744073709551615: xgrammar fails, llguidance loses 18446744073709551615, outlines-core keeps all
set -eu
here=$(mktemp -d)
trap 'rm -rf "$here"' EXIT
python3 -m venv "$here/venv"
"$here/venv/bin/python" -m pip install --quiet torch==2.13.0 numpy==2.4.6 xgrammar==0.2.9 llguidance==1.9.1 \
  outlines-core==0.2.14 jsonschema==4.26.0
cat > "$here/bounds.py" <<'PYTHON'
import json
import re

import jsonschema
import llguidance
import xgrammar
from outlines_core.json_schema import build_regex_from_schema

END = 256  # behind the tokens of one byte
tokens = xgrammar.TokenizerInfo([bytes([i]) for i in range(END)] + [b"</s>"], stop_token_ids=[END])
compiler, bytewise = xgrammar.GrammarCompiler(tokens, max_threads=1), llguidance.LLTokenizer("byte")


def of_xgrammar(schema):
    grammar = compiler.compile_json_schema(schema)

    def takes(text):
        matcher = xgrammar.GrammarMatcher(grammar)
        return all(matcher.accept_token(each) for each in text.encode()) and matcher.accept_token(END)

    return takes


def of_llguidance(schema):
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    if llguidance.LLMatcher(bytewise, grammar).is_error():
        raise RuntimeError("no grammar")

    def takes(text):
        matcher = llguidance.LLMatcher(bytewise, grammar)
        return all(matcher.try_consume_tokens([each]) for each in text.encode()) and matcher.is_accepting()

    return takes


def of_outlines(schema):
    pattern = re.compile(build_regex_from_schema(schema))
    return lambda text: pattern.fullmatch(text) is not None


engines = {"xgrammar": of_xgrammar, "llguidance": of_llguidance, "outlines-core": of_outlines}
values = {
    "number": ["0.5", "0.0000001", "1e-7"],
    "string": [json.dumps(f"a{each}b") for each in ("", "\n", "\t", '"', "\\")],
    "integer": ["0", str(-(2**63)), str(2**53 + 1), str(2**64 - 1)],
}
bounds = (
    ("number", {}),
    ("number", {"minimum": 0}),
    ("number", {"maximum": 2.0**128}),
    ("string", {}),
    ("string", {"minLength": 1}),
    ("string", {"pattern": "^[^x]*$"}),
    ("integer", {}),
    ("integer", {"minimum": -(2**63)}),
    ("integer", {"maximum": 2**53 + 1}),
    ("integer", {"maximum": 2**64 - 1}),
)
for kind, bound in bounds:
    schema = {"type": kind, **bound}
    validator = jsonschema.Draft202012Validator(schema)
    valid = [each for each in values[kind] if validator.is_valid(json.loads(each))]
    assert len(valid) > 1
    said = []
    for name, engine in engines.items():
        try:
            takes = engine(json.dumps(schema))
            lost = [each for each in valid if not takes(each)]
            said.append(f"{name} loses {', '.join(lost)}" if lost else f"{name} keeps all")
        except RuntimeError:
            said.append(f"{name} fails")
    print(", ".join((kind, *(f"{key} {each}" for key, each in bound.items()))) + ":", ", ".join(said))
PYTHON
"$here/venv/bin/python" -W ignore "$here/bounds.py" > "$here/seen" 2> "$here/said" || (cat "$here/said" && exit 1)
cat "$here/seen"
sed -n '/^# Output seen/,/^set/s/^#   //p' "$0" | diff - "$here/seen"
echo "as stated"
