"""Token thresholds: what each way of computing promises, and where they stand."""

import ast
from pathlib import Path

from lowbit.runtime import thresholds

RUNTIME = Path(thresholds.__file__).parent


def test_tokens_with_the_bits_of_one_take_the_kernels_of_few() -> None:
    for few in (
        thresholds.PACKED_TOKENS,
        thresholds.DENSE_TOKENS,
        thresholds.EXPERTS_TOKENS,
    ):
        assert few >= thresholds.EXACT_TOKENS


def test_rounds_of_drafts_are_steps_whose_bits_are_exact() -> None:
    assert thresholds.ROUND_TOKENS <= thresholds.EXACT_TOKENS
    assert thresholds.SEQUENCE_TOKENS <= thresholds.EXACT_TOKENS
    assert thresholds.STATES_TOKENS <= thresholds.ROUND_TOKENS
    assert 2 * thresholds.ROUND_SEQUENCES <= thresholds.ROUND_TOKENS


def test_thresholds_stand_in_one_place() -> None:
    found = []
    for room in ("kernels", "backends", "state", "engine"):
        for path in RUNTIME.glob(f"{room}/**/*.py"):
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
                    names = [ast.unparse(target) for target in node.targets]
                    found += [f"{path.name}: {name}" for name in names if name.endswith("_TOKENS")]
    assert not found
