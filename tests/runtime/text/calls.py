"""Calls as texts, and texts of parts of calls."""

from lowbit.runtime.text.tools import CallForm

FORMS: list[CallForm] = ["json", "xml"]
F1 = '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'
G1 = '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
XF1 = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
XG1 = "<tool_call><function=g></function></tool_call>"
PARTS = [
    *("a", "é😀", " ", "\n", '"', "\\", "{", "}", ":", ",", "5", "null", "END"),
    *("<tool_call>", "</tool_call>", "<function=f>", "<function=h>", "</function>"),
    *("<parameter=x>", "</parameter>", '{"name": "f", "arguments": {"x": "', '"}}', F1, XF1, G1),
]


def xml_value(value: str, parameter: str = "x") -> str:
    return XF1.replace("\n1\n", value).replace("=x>", f"={parameter}>")
