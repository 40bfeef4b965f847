"""Formats of answers that requests ask for."""

from typing import Any

import pytest

from lowbit.runtime.serve.errors import ApiError
from lowbit.runtime.serve.request.forms import schema_format


def schema_of(bound: float) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": {"type": "integer", "maximum": bound}}}


def test_strict_schemas_refuse_bounds_that_would_be_rounded() -> None:
    """llguidance would take 2^53 + 4 under a maximum of 2^53 + 3."""
    with pytest.raises(ApiError, match=r"`schema`: `maximum` beyond 2\^53"):
        schema_format(schema_of(2**53 + 3), "schema", strict=True)
    loose = schema_format(schema_of(2**53 + 3), "schema")
    assert loose.left_out == ["keyword maximum"]
    for bound in (2**53, 2**63 - 1):
        schema = schema_of(bound)
        assert schema_format(schema, "schema", strict=True).schema == schema
