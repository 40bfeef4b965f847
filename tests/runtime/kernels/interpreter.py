"""Triton's interpreter with the same bits on every processor, and without work that it repeats."""

import inspect
import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tests.runtime.kernels.arithmetic import (
    Array,
    exp,
    exp2,
    halved,
    larger,
    log,
    product,
    smaller,
)

PLAIN = frozenset({"fp32", "int32", "int64", "uint32", "uint64", "bf16", "fp16"})  # dtypes
UNKNOWN = ("clampf", "cos", "dot_scaled", "erf", "log2", "sin")


@contextmanager
def quick_interpreter() -> Iterator[None]:
    """Kernels are interpreted fast, and with `arithmetic`."""
    with pytest.MonkeyPatch.context() as patch:
        repeat_nothing(patch)
        scan_at_once(patch)
        compute_alike(patch)
        yield


def compute_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what the interpreter leaves to BLAS, vector code and the C library."""
    builder, standard, reduce = (
        interpreter.InterpreterBuilder,
        tl.standard,
        interpreter.ReduceOps.apply_impl,
    )
    joins = (
        (standard._sum_combine, np.add),
        (standard._elementwise_max, larger),
        (standard._elementwise_min, smaller),
    )

    def unary(function: Callable[[Array], Array]) -> Callable[..., Any]:
        return lambda self, x: self.unary_op(x, function)

    def binary(function: Callable[[Array, Array], Array]) -> Callable[..., Any]:
        return lambda self, a, b: self.binary_op(a, b, function)

    def dot(self: Any, a: Any, b: Any, c: Any, *precision: Any) -> Any:
        assert a.data.dtype == b.data.dtype == c.data.dtype == np.float32
        return interpreter.TensorHandle(product(a.data, b.data) + c.data, c.dtype.scalar)

    def reduced(self: Any, given: Any) -> Any:
        join = next((join for fn, join in joins if fn is self.combine_fn), None)
        x = given[0].handle.data
        if join is None or x.dtype.kind != "f":
            return reduce(self, given)
        found = halved(x.reshape(-1) if self.axis is None else np.moveaxis(x, self.axis, 0), join)
        if self.keep_dims:
            found = np.expand_dims(found, range(x.ndim) if self.axis is None else self.axis)
        return self.to_tensor(found, given[0].dtype)

    def unknown(name: str) -> Callable[..., Any]:
        return lambda *given: pytest.fail(f"{name} depends on the processor: add it to arithmetic")

    monkeypatch.setattr(builder, "create_dot", dot)
    for name, function in (("exp", exp), ("exp2", exp2), ("log", log)):
        monkeypatch.setattr(builder, f"create_{name}", unary(function))
    for name, choose in (("maxnumf", larger), ("minnumf", smaller)):
        monkeypatch.setattr(builder, f"create_{name}", binary(choose))
    for name in UNKNOWN:
        monkeypatch.setattr(builder, f"create_{name}", unknown(name), raising=False)
    monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", reduced)


def scan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scan integers by steps of 1, 2, 4: the interpreter joins them one after the other."""
    scan = interpreter.ScanOps.generic_scan

    def scanned(self: Any, given: Any) -> Any:
        if any(x.handle.data.dtype.kind not in "iu" for x in given):
            return scan(self, given)
        shape = given[0].handle.data.shape
        place, step = np.indices(shape)[self.axis], 1
        while step < shape[self.axis]:
            before = [
                self.to_tensor(np.roll(x.handle.data, step, self.axis), x.dtype) for x in given
            ]
            joined = self.combine_fn.fn(*before, *given)
            joined = joined if isinstance(joined, tuple) else (joined,)
            given = [
                self.to_tensor(np.where(place < step, x.handle.data, y.handle.data), x.dtype)
                for x, y in zip(given, joined, strict=True)
            ]
            step *= 2
        return given

    monkeypatch.setattr(interpreter.ScanOps, "generic_scan", scanned)


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
    call_at_once(monkeypatch)
    promote_at_once(monkeypatch)
    convert_at_once(monkeypatch)
    check_at_once(monkeypatch)


def share_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the facts of a block type, and the shape of a tensor, once for all of the same sizes."""
    core = tl.core
    new_block, equal = core.block_type.__init__, core.dtype.__eq__
    broadcast = TritonSemantic.broadcast_impl_value
    made: dict[tuple[int, tuple[Any, ...]], dict[str, Any]] = {}  # types of elements live in them

    @cache
    def sizes_of(shape: tuple[int, ...]) -> tuple[Any, Any]:
        each = [core.constexpr(size) for size in shape]
        return core.constexpr(math.prod(shape)), core.tuple(each)

    scalar_sizes = sizes_of(())

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(getattr(size, "value", size) for size in shape)
        facts = made.get((id(element_ty), sizes))
        if facts is None:
            one = object.__new__(core.block_type)
            new_block(one, element_ty, shape)
            facts = made[id(element_ty), sizes] = vars(one)
            facts["sizes"] = sizes_of(sizes)
        vars(self).update(facts)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.sizes if type.is_block() else scalar_sizes

    def same(self: Any, other: Any) -> bool:
        return self is other or equal(self, other)

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if a is b or not (a.is_block() or b.is_block()):
            return lhs, rhs
        if a.is_block() and b.is_block() and a.shape.values == b.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    monkeypatch.setattr(core.block_type, "__init__", block_type)
    monkeypatch.setattr(core.tensor, "__init__", tensor)
    monkeypatch.setattr(core.dtype, "__eq__", same)
    monkeypatch.setattr(TritonSemantic, "broadcast_impl_value", broadcast_unless_equal)


def call_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Call what a kernel names without functions between that hand arguments on."""
    unwrap, semantic = tl.core._unwrap_if_constexpr, interpreter.interpreter_semantic
    plain = frozenset({tl.tensor, int, type(None)})

    def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        function = inspect.unwrap(member)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return function(*args, **named)

        scope.set_attr(obj, name, call)

    def unwrapped(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    def handle(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1:  # one byte fits in any type
            self.__post_init__()

    monkeypatch.setattr(interpreter, "_patch_attr", patch_attr)
    monkeypatch.setattr(tl.core, "_unwrap_if_constexpr", unwrapped)
    monkeypatch.setattr(interpreter.TensorHandle, "__init__", handle)


def promote_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operands of one dtype need no common one: the interpreter asks for it thirty questions."""
    check = TritonSemantic.binary_op_type_checking_impl

    def fits(value: Any, dtype: Any) -> bool:
        """True if a number of Python takes the dtype of a tensor beside it."""
        if dtype.name == "fp32":
            return type(value) in (int, float)
        return dtype.name in ("int32", "int64") and type(value) is int and abs(value) < 1 << 31

    def checked(self: Any, lhs: Any, rhs: Any, *rules: bool, **named: bool) -> Any:
        if rules == (True, True) and isinstance(lhs, tl.tensor) and lhs.dtype.is_ptr():
            if type(rhs) is int and abs(rhs) < 1 << 31:
                rhs = self.scalar_constant(rhs, dtype=tl.int32)
            if isinstance(rhs, tl.tensor) and rhs.dtype.is_int():
                return self.broadcast_impl_value(lhs, rhs)
        if len(rules) <= 2 and not named and isinstance(lhs, tl.tensor):
            if not isinstance(rhs, tl.tensor) and fits(rhs, lhs.dtype):
                rhs = self.scalar_constant(rhs, dtype=lhs.dtype)
            if isinstance(rhs, tl.tensor):
                name = lhs.dtype.name
                if name in PLAIN and name == rhs.dtype.name:
                    return self.broadcast_impl_value(lhs, rhs)
        return check(self, lhs, rhs, *rules, **named)

    monkeypatch.setattr(TritonSemantic, "binary_op_type_checking_impl", checked)


def convert_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 is the upper half of FP32: the interpreter takes sign, exponent and digits apart."""
    convert = interpreter._convert_float

    def converted(given: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.bfloat16 and target == tl.float32:
            return given.view(np.uint16).astype(np.uint32) << 16
        if source == tl.float32 and target == tl.bfloat16 and rounding is None:  # cut off
            return (np.ascontiguousarray(given).view(np.uint32) >> 16).astype(np.uint16)
        return convert(given, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", converted)


def check_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for integers that overflow in numbers, not by some more operations of a kernel."""
    operations = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
    of_one = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}

    def check(self: Any, lhs: Any, rhs: Any, operation: Any) -> None:
        kind, name = lhs.type.scalar, operation.__name__
        if kind.int_bitwidth >= 64:
            return
        least, most = kind.get_int_min_value(), kind.get_int_max_value()
        if lhs.handle.data.size == rhs.handle.data.size == 1:
            lone = of_one[name](lhs.handle.data.item(), rhs.handle.data.item())
            assert least <= lone <= most, f"{kind} overflow detected for operation {name}"
            return
        found = operations[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
        assert least <= found.min(), f"{kind} overflow detected for operation {name}"
        assert found.max() <= most, f"{kind} overflow detected for operation {name}"

    monkeypatch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", check)
