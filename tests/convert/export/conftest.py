"""Packed folders of random codes in the test's own folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.export.packed_folders import DENSE, HYBRID, TEXT, Choose, Edit, make_packed


@pytest.fixture
def dense_config() -> dict[str, Any]:
    return dict(DENSE)


@pytest.fixture
def hybrid_config() -> dict[str, Any]:
    return json.loads(json.dumps(HYBRID))  # type: ignore[no-any-return]


@pytest.fixture
def pack_dense(tmp_path: Path) -> Callable[..., Path]:
    """Pack the dense model: (scheme of a spec, edit of the tensors), and keys of its config."""

    def pack(choose: Choose, edit: Edit | None = None, **config: Any) -> Path:
        return make_packed(tmp_path / "packed", {**DENSE, **config}, choose, edit)

    return pack


@pytest.fixture
def pack_hybrid(tmp_path: Path) -> Callable[..., Path]:
    """Pack the Qwen3.5 model: (scheme of a spec, edit of the tensors), and keys of its text."""

    def pack(choose: Choose, edit: Edit | None = None, **text: Any) -> Path:
        config = {**HYBRID, "text_config": {**TEXT, **text}}
        return make_packed(tmp_path / "packed", config, choose, edit)

    return pack
