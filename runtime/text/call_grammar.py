"""Grammars of answers that call tools, in llguidance's variant of Lark.

A grammar names the tokens `<tool_call>` and `</tool_call>` where the tokenizer has them, and spells
them elsewhere. Arguments follow their JSON schema, in the notation of the chat templates.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from lowbit.formats.errors import RequestError
from lowbit.runtime.text.closed_schema import closed
from lowbit.runtime.text.grammar_source import MOST_BYTES
from lowbit.runtime.text.loose_schema import loosened, rounded_bounds
from lowbit.runtime.text.tokenizer import Tokenizer
from lowbit.runtime.text.tools import CLOSE_CALL, OPEN_CALL, ArgumentTypes, CallForm, Tool, resolve
from lowbit.runtime.text.xml_values import END, Leaf, Steps, UnheldError, terminal_of

CLOSE_TAG = "\n</parameter>"
CLOSE_VALUE = CLOSE_TAG + "\n"
NO_TAG = r"~/(?s:.*)<\/parameter>(?s:.+)/"  # no closing tag but at the end
# Keywords of all arguments together; alternatives, too.
OF_WHOLE = (
    *("patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"),
    *("dependentSchemas", "anyOf", "oneOf", "allOf", "not", "if", "enum", "const"),
)
# Keywords of a function that lists no parameters
WITHOUT_ARGUMENTS = {"type", "properties", "required", "title", "description", "$schema"}
INNER = ("#/$defs/", "#/definitions/")  # references that stand without the rest of a schema
# The JSON of Qwen's templates: a space behind `:` and `,`, no line breaks.
NOTATION = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one grammar."""

    steps: Steps
    left_out: set[str]  # keywords of tools that are not strict which the grammar does not enforce


def grammar_of(
    form: CallForm,
    tools: Sequence[Tool],
    choice: str | Literal["required"],
    tokenizer: Tokenizer,
    parallel: bool = True,
    left_out: set[str] | None = None,
) -> str:
    """Lark text of an answer that is one call or several, without other content.

    Args:
        choice: `required` for any of the tools, or the name of the only one.
        left_out: gets the keywords of tools that are not strict which the grammar does not enforce.

    Raises:
        RequestError: no tool has the name.
    """
    allowed = [tool for tool in tools if choice in ("required", tool.name)]
    if not allowed:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise RequestError(f"no tool is named `{choice}`", hint=f"the tools: {known}")
    opening, closing = _mark(OPEN_CALL, tokenizer), _mark(CLOSE_CALL, tokenizer)
    start = "start: BLANK call" + (r' ("\n" call)*' if parallel else "")
    rules = chain(
        (start, rf'call: {opening} "\n" any_call "\n" {closing}'),
        _rules_of_calls(form, allowed, set() if left_out is None else left_out),
    )
    return _joined(rules)


def grammar_of_rest(form: CallForm, tools: Sequence[Tool], tokenizer: Tokenizer) -> str:
    """Lark text of a call behind its opening tag, closing tag included.

    Arguments of tools that are not strict are any.
    """
    head = f"start: BLANK any_call BLANK {_mark(CLOSE_CALL, tokenizer)}"
    return _joined(chain((head,), _rules_of_calls(form, _loosened(tools), set())))


def grammar_of_text(form: CallForm, tools: Sequence[Tool]) -> str:
    """Lark text of any text with any number of calls, where the tags are spelled.

    Arguments of tools that are not strict are any.
    """
    anything, tag = "/(?s:.*)/", f"/(?s:.*){OPEN_CALL}(?s:.*)/"
    rules = (
        "start: (up_to_tag call)* WITHOUT_TAG",
        f"up_to_tag[lazy]: /(?s:.*){OPEN_CALL}/",
        f"WITHOUT_TAG: {anything} & ~{tag}",
        f"call: BLANK any_call BLANK {json.dumps(CLOSE_CALL)}",
    )
    return _joined(chain(rules, _rules_of_calls(form, _loosened(tools), set())))


def _joined(rules: Iterable[str]) -> str:
    """Lines of rules, no longer than a grammar may be: what is beyond is not even made.

    A parameter brings the definitions that it refers to, so the text may grow with the square of
    the schema.
    """
    lines, size = [], 0
    for rule in rules:
        lines.append(rule + "\n")
        size += len(rule)
        if size > MOST_BYTES:
            raise RequestError(
                f"the grammar of the tools has more than {MOST_BYTES} bytes",
                hint="give fewer tools, or shorter schemas",
            )
    return "".join(lines)


def _loosened(tools: Sequence[Tool]) -> list[Tool]:
    return [tool if tool.strict else Tool(tool.name) for tool in tools]


def _rules_of_calls(form: CallForm, tools: Sequence[Tool], left_out: set[str]) -> Iterator[str]:
    """The rule `any_call`, and those that it needs; `left_out` as in `grammar_of`."""
    yield r"BLANK: /[ \n]{0,4}/"
    yield "any_call: " + " | ".join(f"call_{index}" for index in range(len(tools)))
    work = Work(Steps(), left_out)
    for index, tool in enumerate(tools):
        yield from (_json_call if form == "json" else _xml_call)(index, tool, work)


def _mark(tag: str, tokenizer: Tokenizer) -> str:
    return json.dumps(tag) if tokenizer.token_id(tag) is None else tag


def _json_call(index: int, tool: Tool, work: Work) -> Iterator[str]:
    begin = f'"name": {json.dumps(tool.name)}, "arguments": '
    schema = {"type": "object", **tool.schema}
    if schema.keys() <= WITHOUT_ARGUMENTS and schema.get("properties") == {}:
        schema["additionalProperties"] = False
    yield f'call_{index}: "{{" BLANK {json.dumps(begin)} arguments_{index} "}}"'
    yield f"arguments_{index}: {_json(schema, tool, work)}"


def _xml_call(index: int, tool: Tool, work: Work) -> Iterator[str]:
    """Tags of the parameters in the order of the schema; those that are not required may lack."""
    schema = _resolved(tool.schema)
    if tool.strict:
        _check_strict(schema, tool)
    work.left_out.update(keyword for keyword in OF_WHOLE if keyword in schema)
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, Mapping):
        properties, required = {}, []
    names = [name for name in properties if _fits_tag(name)]
    parts = []
    for number, name in enumerate(names):
        needed = isinstance(required, list) and name in required
        parts.append(f"value_{index}_{number}{'' if needed else '?'}")
    is_free = not isinstance(schema.get("properties"), Mapping) and _is_open(schema)
    if is_free:
        parts.append(f"any_{index}*")
    begin, end = json.dumps(f"<function={tool.name}>\n"), json.dumps("</function>")
    yield f"call_{index}: {' '.join((begin, *parts, end))}"
    if is_free:
        more = schema.get("additionalProperties", True)
        yield from _value(f"any_{index}", r'"<parameter=" /[^>\n]+/ ">\n"', "any", more, tool, work)
    for number, name in enumerate(names):
        begin = json.dumps(f"<parameter={name}>\n")
        rule = f"value_{index}_{number}"
        yield from _value(rule, begin, name, properties[name], tool, work)


def _value(rule: str, begin: str, name: str, schema: Any, tool: Tool, work: Work) -> Iterator[str]:
    """A parameter: text if it may be a string, else JSON.

    Raises:
        RequestError: a keyword of a strict tool that cannot be held.
    """
    types = tool.types.of(schema)
    held: tuple[str, list[Leaf]] | None = None
    try:
        if not types or "string" in types:
            held = terminal_of(schema, tool.types, work.steps)
    except UnheldError as error:
        if tool.strict:
            raise _unheld(tool, f"`{name}`", error.keyword) from None
        work.left_out.add(error.keyword.partition(":")[0])
        held = f"/(?s:.*){END}/", []
    if held is None:
        yield f"{rule}: {begin} {rule}_json {json.dumps(CLOSE_VALUE)}"
        yield f"{rule}_json: {_json(_within(schema, name, tool, work), tool, work)}"
        return
    text, inner = held
    kinds = f"({rule}_text | {rule}_json {json.dumps(CLOSE_TAG)})" if inner else f"{rule}_text"
    yield rf'{rule}: {begin} {kinds} "\n"'
    yield f"{rule}_text[lazy]: ({text}) & {NO_TAG}"
    if inner:
        yield f"{rule}_json: {_json(_within({'anyOf': inner}, name, tool, work), tool, work)}"


def _within(schema: Any, name: str, tool: Tool, work: Work) -> Any:
    """A part of a tool's schema that stands without the rest; else one of its types alone.

    Raises:
        RequestError: the part of a strict tool refers to more than definitions.
    """
    every = [schema, referenced(schema, tool.schema)]
    if all(reference.startswith(INNER) for reference in _references(every)):
        return schema
    if tool.strict:
        raise _unheld(tool, f"`{name}`", "$ref")
    work.left_out.add("$ref")
    return {"type": sorted(ArgumentTypes(tool.schema).of(schema))}


def _check_strict(schema: Mapping[str, Any], tool: Tool) -> None:
    """Refuse a strict tool whose arguments as a whole have limits that tags cannot hold.

    Raises:
        RequestError: names the tool and the keyword.
    """
    for keyword in OF_WHOLE:
        if keyword in schema:
            raise _unheld(tool, "the arguments", keyword)
    properties, required = schema.get("properties"), schema.get("required")
    known = properties if isinstance(properties, Mapping) else {}
    for name in required if isinstance(required, list) else ():
        if not (isinstance(name, str) and name in known and _fits_tag(name)):
            raise _unheld(tool, f"`{name!s:.80}`", "required")


def _unheld(tool: Tool, where: str, keyword: str) -> RequestError:
    return RequestError(
        f"tool `{tool.name}`: {where} has `{keyword}`, which `strict` cannot hold in this model's "
        "form of calls",
        hint="leave out the keyword, or `strict`",
    )


def _json(schema: Mapping[str, Any], tool: Tool, work: Work) -> str:
    definitions = referenced(schema, tool.schema)
    options = {**NOTATION, "lenient": not tool.strict}
    whole = closed({**definitions, **schema})
    if not tool.strict:
        whole, keywords = loosened(whole)
        work.left_out.update(keywords)
    else:
        for keyword in rounded_bounds(whole):
            raise RequestError(
                f"tool `{tool.name}`: `{keyword}` beyond 2^53 cannot be enforced",
                hint="leave out the keyword, or `strict`",
            )
    return f"%json {json.dumps({**whole, 'x-guidance': options})}"


def referenced(schema: Any, root: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The definitions of a schema that a part of it refers to, themselves or through others."""
    found: dict[str, dict[str, Any]] = {}
    left = [schema]
    while left:
        for reference in _references(left.pop()):
            steps = reference.split("/", 3)[:3]
            if len(steps) < 3 or not reference.startswith(INNER):
                continue
            kind, name = steps[1], steps[2].replace("~1", "/").replace("~0", "~")
            listed = root.get(kind)
            known = found.setdefault(kind, {})
            if isinstance(listed, Mapping) and name in listed and name not in known:
                known[name] = listed[name]
                left.append(listed[name])
    return found


def _references(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        part = left.pop()
        left += part.values() if isinstance(part, Mapping) else part if _is_list(part) else ()
        reference = part.get("$ref") if isinstance(part, Mapping) else None
        if isinstance(reference, str):
            yield reference


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema itself, or the part of it to which it refers as a whole."""
    found = resolve(schema["$ref"], schema) if "$ref" in schema else schema
    return found if isinstance(found, Mapping) else {}


def _is_open(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties", True) is not False


def _fits_tag(name: str) -> bool:
    return bool(name) and not any(sign in name for sign in ">\n")
