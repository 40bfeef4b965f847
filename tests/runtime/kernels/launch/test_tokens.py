"""Token thresholds: what each way of computing promises, and where they stand."""

import ast
from pathlib import Path

from lowbit.runtime.kernels.launch import tokens
from lowbit.runtime.state.step import EXACT_TOKENS

RUNTIME = Path(tokens.__file__).parents[2]


def test_tokens_with_the_bits_of_one_take_the_kernels_of_few() -> None:
    for few in (
        tokens.GEMV_TOKENS,
        tokens.PACKED_TOKENS,
        tokens.DENSE_TOKENS,
        tokens.EXPERTS_TOKENS,
    ):
        assert few >= EXACT_TOKENS


def test_thresholds_stand_in_one_place() -> None:
    found = []
    for path in (*RUNTIME.glob("kernels/**/*.py"), *RUNTIME.glob("backends/*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                names = [ast.unparse(target) for target in node.targets]
                found += [f"{path.name}: {name}" for name in names if name.endswith("_TOKENS")]
    assert {each.split(":")[0] for each in found} == {"tokens.py"}, found
