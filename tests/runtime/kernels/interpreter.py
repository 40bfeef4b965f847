"""Triton's interpreter without the work that it repeats at every call inside of a kernel."""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter


def repeat_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions of Triton's interpreter by ones that do the same once.

    It replaces what `triton.language` holds at each call of a function inside of a kernel, though
    nothing is put back before the launch ends: one time a launch is enough. And it builds its table
    of dtypes whenever it looks one up. A Triton that is built otherwise is left as it is.
    """
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    patch, restore = interpreter._patch_lang, interpreter._LangPatchScope.restore
    of_numpy = cache(interpreter._get_np_dtype)
    patched: set[frozenset[str]] = set()  # in this launch, by the modules that a function sees

    @cache
    def modules(fn: Callable[..., Any]) -> frozenset[str]:
        seen = (value for value in fn.__globals__.values() if inspect.ismodule(value))
        return frozenset(module.__name__ for module in seen if module in (tl, tl.core))

    def patch_once(fn: Callable[..., Any]) -> Any:
        if modules(fn) in patched:
            return interpreter._LangPatchScope()
        scope = patch(fn)
        patched.add(modules(fn))
        return scope

    def restore_all(scope: Any) -> None:
        patched.clear()
        restore(scope)

    def np_dtype(dtype: Any) -> "np.dtype[Any]":
        one = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return np.dtype(np.uint64) if isinstance(one, tl.pointer_type) else of_numpy(one)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_once)
    monkeypatch.setattr(interpreter._LangPatchScope, "restore", restore_all)
    monkeypatch.setattr(interpreter, "_get_np_dtype", np_dtype)
