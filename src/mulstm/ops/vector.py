"""Formulas over rows of numbers as machine code for this CPU's vectors: one pass over memory each."""
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from llvmlite import binding, ir

INT, WORD, FLOAT, SHORT, POINTER = (
    ir.IntType(64),
    ir.IntType(32),
    ir.FloatType(),
    ir.IntType(16),
    ir.PointerType(),
)


class Operand(NamedTuple):
    """A contiguous (B, blocks * H) array of float32 or bf16; where `shared`, one row for all lanes."""

    blocks: int = 1
    bf16: bool = False
    shared: bool = False


class V:
    """A vector in a formula: of float32, or of their bits."""

    def __init__(self, b: ir.IRBuilder, value: ir.Value) -> None:
        self.b, self.value = b, value

    def like(self, number: float) -> V:
        """The number in every place."""
        return V(self.b, ir.Constant(self.value.type, [number] * self.value.type.count))

    def _pair(self, make: Callable[[ir.Value, ir.Value], ir.Value], x: V | float, y: V | float) -> V:
        x, y = (v if isinstance(v, V) else self.like(v) for v in (x, y))
        return V(self.b, make(x.value, y.value))

    def __add__(self, other: V | float) -> V:
        return self._pair(self.b.fadd, self, other)

    def __sub__(self, other: V | float) -> V:
        return self._pair(self.b.fsub, self, other)

    def __rsub__(self, other: float) -> V:
        return self._pair(self.b.fsub, other, self)

    def __mul__(self, other: V | float) -> V:
        return self._pair(self.b.fmul, self, other)

    def __truediv__(self, other: V | float) -> V:
        return self._pair(self.b.fdiv, self, other)

    def __rtruediv__(self, other: float) -> V:
        return self._pair(self.b.fdiv, other, self)

    def times(self, factor: V | float, plus: V | float) -> V:
        """self * factor + plus, rounded once where the CPU can."""
        kind = self.value.type
        name = f"llvm.fmuladd.v{kind.count}f32"
        known = self.b.module.globals.get(name)
        f = known or ir.Function(self.b.module, ir.FunctionType(kind, [kind] * 3), name)
        x, y = (v if isinstance(v, V) else self.like(v) for v in (factor, plus))
        return V(self.b, self.b.call(f, [self.value, x.value, y.value]))

    def instead(self, of: V, sign: str, limit: float) -> V:
        """self where `of` is beyond the limit, else `of`: NaN stays NaN."""
        beyond = self.b.fcmp_ordered(sign, of.value, of.like(limit).value)
        return V(self.b, self.b.select(beyond, self.value, of.value))

    def between(self, low: float, high: float) -> V:
        """Cut off below and above; NaN stays NaN."""
        cut = self.like(low).instead(self, "<", low)
        return self.like(high).instead(cut, ">", high)

    def cast(self, lane: ir.Type) -> V:
        """The same bits under another type."""
        return V(self.b, self.b.bitcast(self.value, ir.VectorType(lane, self.value.type.count)))


# Cephes' exp on |r| < log(2) / 2: exp(r) = 1 + r + r^2 (...), the last coefficient first.
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG2_E, _LN2, _LN2_REST = 1.4426950408889634, 0.693359375, -2.12194440e-4
_ROUND = 12582912.0  # 1.5 * 2^23: what is added to it is rounded to an integer, which its last bits hold
_FAR = 87.0  # exp of it and of its negative are normal numbers


def _exponential(x: V) -> tuple[V, V]:
    """s and p with exp(x) = s + s p, s a power of two; |x| <= _FAR."""
    shifted = x.times(_LOG2_E, _ROUND)
    k = shifted - _ROUND
    r = k.times(-_LN2_REST, k.times(-_LN2, x))
    p = r.like(_EXP[0])
    for coefficient in _EXP[1:]:
        p = p.times(r, coefficient)
    p = p.times(r * r, r)
    b, n = x.b, shifted.cast(WORD)
    power = b.add(b.shl(n.value, n.like(23).value), n.like(127 << 23).value)
    return V(b, power).cast(FLOAT), p


def sigmoid(x: V) -> V:
    """1 / (1 + exp(-x)) to the last digits; far below zero exactly 0."""
    s, p = _exponential((0.0 - x).between(-_FAR, _FAR))
    y = 1.0 / (s.times(p, s) + 1.0)
    shut = x.b.fcmp_ordered("<", x.value, x.like(-_FAR).value)
    return V(x.b, x.b.select(shut, x.like(0.0).value, y.value))


def tanh(x: V) -> V:
    """expm1(2x) / (expm1(2x) + 2): to the last digits near zero too."""
    s, p = _exponential((x + x).between(-20.0, 20.0))
    e = s.times(p, s - 1.0)
    return e / (e + 2.0)


class Place:
    """Where a formula is evaluated: some columns of one lane. `"name" in place` asks for an operand."""

    def __init__(
        self,
        b: ir.IRBuilder,
        operands: Mapping[str, Operand],
        arguments: Mapping[str, ir.Value],
        lane: ir.Value,
        column: ir.Value,
        width: int,
    ) -> None:
        self.b, self.operands, self.arguments = b, operands, arguments
        self.lane, self.column, self.width = lane, column, width

    def __contains__(self, name: str) -> bool:
        return name in self.operands

    def _address(self, name: str, block: int) -> ir.Value:
        b, operand, H = self.b, self.operands[name], self.arguments["H"]
        index = b.add(b.mul(H, INT(block)), self.column)
        if not operand.shared:
            index = b.add(b.mul(self.lane, b.mul(H, INT(operand.blocks))), index)
        kind = SHORT if operand.bf16 else FLOAT
        return b.gep(self.arguments[name], [index], source_etype=kind)

    def get(self, name: str, block: int = 0) -> V:
        """The operand here, as float32."""
        b, address = self.b, self._address(name, block)
        if not self.operands[name].bf16:
            return V(b, b.load(address, typ=ir.VectorType(FLOAT, self.width), align=4))
        wide = ir.VectorType(WORD, self.width)
        bits = b.zext(b.load(address, typ=ir.VectorType(SHORT, self.width), align=2), wide)
        return V(b, b.shl(bits, ir.Constant(wide, [16] * self.width))).cast(FLOAT)

    def put(self, name: str, x: V, block: int = 0) -> None:
        """Writes the operand here, to the nearest even where it is bf16."""
        b, address = self.b, self._address(name, block)
        if not self.operands[name].bf16:
            b.store(x.value, address, align=4)
            return
        n = x.cast(WORD)
        top = b.lshr(n.value, n.like(16).value)
        even = b.and_(top, n.like(1).value)
        near = b.lshr(b.add(n.value, b.add(even, n.like(0x7FFF).value)), n.like(16).value)
        nan = b.fcmp_unordered("uno", x.value, x.value)
        bits = b.select(nan, n.like(0x7FC0).value, near)
        b.store(b.trunc(bits, ir.VectorType(SHORT, self.width)), address, align=2)


Formula = Callable[[Place], None]
Write = Callable[[ir.IRBuilder, list[ir.Value]], None]  # code that works on the arguments


@contextmanager
def loop(b: ir.IRBuilder, start: ir.Value, stop: ir.Value, step: int) -> Iterator[ir.Value]:
    """for index in range(start, stop, step), step dividing the difference."""
    before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.cbranch(b.icmp_signed("<", start, stop), body, after)
    b.position_at_end(body)
    index = b.phi(INT)
    index.add_incoming(start, before)
    yield index
    further = b.add(index, INT(step))
    index.add_incoming(further, b.block)
    b.cbranch(b.icmp_signed("<", further, stop), body, after)
    b.position_at_end(after)


class Code:
    """void kernel(int64 *arguments), written by `write`, compiled for this CPU."""

    def __init__(self, write: Write, arguments: int) -> None:
        module = ir.Module()
        module.triple = binding.get_process_triple()
        f = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "kernel")
        b = ir.IRBuilder(f.append_basic_block())
        write(b, [b.load(b.gep(f.args[0], [INT(k)], source_etype=INT), typ=INT) for k in range(arguments)])
        b.ret_void()
        code = binding.parse_assembly(str(module))
        machine = _machine()
        passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
        passes.getModulePassManager().run(code, passes)
        self.engine = binding.create_mcjit_compiler(code, machine)  # the code lives as long as it
        self.address = self.engine.get_function_address("kernel")
        self.here: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self.address)
        self.Arguments: Any = ctypes.c_int64 * arguments
        self.team = _gomp()

    def __call__(self, threads: int, *arguments: int) -> None:
        """By so many of PyTorch's own threads: a team of ours would fight with them for the cores."""
        if threads > 1 and self.team is not None:
            self.team.GOMP_parallel(self.address, self.Arguments(*arguments), threads, 0)
        else:
            self.here(self.Arguments(*arguments))


def has_team() -> bool:
    """Whether more threads than this one can work."""
    return _gomp() is not None


def share(b: ir.IRBuilder, count: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Where this thread's part of so many things begins and ends."""
    mine, threads = thread(b), _ask(b, "omp_get_num_threads", 1)
    low, high = (b.sdiv(b.mul(count, k), threads) for k in (mine, b.add(mine, INT(1))))
    return low, high


def thread(b: ir.IRBuilder) -> ir.Value:
    """This thread's number."""
    return _ask(b, "omp_get_thread_num", 0)


def _ask(b: ir.IRBuilder, name: str, alone: int) -> ir.Value:
    return b.sext(b.call(_known(b, name, WORD), []), INT) if has_team() else INT(alone)


def _known(b: ir.IRBuilder, name: str, result: ir.Type) -> ir.Function:
    """A function of PyTorch's OpenMP library."""
    binding.add_symbol(name, ctypes.cast(getattr(_gomp(), name), ctypes.c_void_p).value)
    known = b.module.globals.get(name)
    return known or ir.Function(b.module, ir.FunctionType(result, []), name)


def over(formula: Formula, operands: Mapping[str, Operand]) -> Write:
    """The formula over all columns of all lanes: its arguments are B, H and each operand's address."""

    def write(b: ir.IRBuilder, given: list[ir.Value]) -> None:
        B, H, *addresses = given
        arguments = {name: b.inttoptr(v, POINTER) for name, v in zip(operands, addresses, strict=True)}
        width = _width()
        whole = b.and_(H, INT(-width))
        with loop(b, *share(b, B), 1) as lane:
            # Whole vectors, then the columns left over one by one.
            for start, stop, step in ((INT(0), whole, width), (whole, H, 1)):
                with loop(b, start, stop, step) as column:
                    formula(Place(b, operands, arguments | {"H": H}, lane, column, step))

    return write


def kernel(formula: Formula, operands: Mapping[str, Operand]) -> Code:
    """The same, compiled."""
    return Code(over(formula, operands), 2 + len(operands))


def then(first: Write, arguments: int, second: Write) -> Write:
    """One after the other, when all threads are done with the first; the first has so many arguments."""

    def write(b: ir.IRBuilder, given: list[ir.Value]) -> None:
        first(b, given[:arguments])
        if has_team():
            b.call(_known(b, "GOMP_barrier", ir.VoidType()), [])
        second(b, given[arguments:])

    return write


@functools.cache
def _gomp() -> Any:
    """The OpenMP library that PyTorch has loaded, or None where it has another."""
    files = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    if len(files) != 1:
        return None
    try:
        library = ctypes.CDLL(str(files[0]))
        library.GOMP_parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
        return library
    except (OSError, AttributeError):
        return None


def _machine() -> Any:
    """The compiler's back end for this CPU; a new one each time, for an engine owns the one it is given."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    target = binding.Target.from_triple(binding.get_process_triple())
    features = binding.get_host_cpu_features().flatten()
    return target.create_target_machine(cpu=binding.get_host_cpu_name(), features=features, opt=3, jit=True)


@functools.cache
def _width() -> int:
    """Float32 numbers in a vector."""
    return 16 if binding.get_host_cpu_features().get("avx512f") else 8
