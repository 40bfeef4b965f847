"""Triton's interpreter without the work that it repeats at every call inside of a kernel."""

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def repeat_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace functions of Triton's interpreter by ones that do the same once.

    It replaces what `triton.language` holds at each call of a function inside of a kernel, though
    nothing is put back before the launch ends: one time a launch is enough. And it builds its table
    of dtypes whenever it looks one up, and the type and shape of every value anew. A Triton that is
    built otherwise is left as it is.
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
    share_types(monkeypatch)


def share_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the facts of a block type, and the shape of a tensor, once for all of the same sizes."""
    core = tl.core
    new_block, equal = core.block_type.__init__, core.dtype.__eq__
    broadcast = TritonSemantic.broadcast_impl_value
    made: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}  # types of elements live in them

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        facts = made.get((id(element_ty), sizes))
        if facts is None:
            one = object.__new__(core.block_type)
            new_block(one, element_ty, shape)
            facts = made[id(element_ty), sizes] = vars(one)
        vars(self).update(facts)

    @cache
    def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        each = [core.constexpr(size) for size in shape]
        return core.constexpr(math.prod(shape)), core.tuple(each)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = sizes_of(tuple(type.shape) if type.is_block() else ())

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(core.dtype, "__eq__", same)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)
