"""Matrix products at the full speed of AVX-512, where a library spends a tenth of the time around them."""
# mypy: disable-error-code="no-untyped-call, no-any-return"

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
from llvmlite import binding, ir
from torch import Tensor

from mulstm.ops.memory import empty
from mulstm.ops.vector import (
    FLOAT,
    INT,
    POINTER,
    WORD,
    Code,
    Formula,
    Operand,
    Write,
    has_team,
    loop,
    over,
    share,
    then,
    thread,
)

LANES, VECTORS, WIDTH = 8, 2, 16  # a tile's sums are in registers: 8 lanes by 2 vectors
PANEL = VECTORS * WIDTH  # rows of W that a tile multiplies
ROWS = 400  # of a weight gradient's operands at a time: what they hold stays in the second cache
LARGE = 1 << 24  # multiplications in a weight gradient, from which BLAS is slower
ARGUMENTS = 7  # of a product: x, W, y, B, K, N, bias
SHARED_FROM = 1 << 18  # multiplications from which a second thread is worth waking
_SUMS = ir.VectorType(FLOAT, WIDTH)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """A type that llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    __hash__ = None  # type: ignore[assignment]


@functools.cache
def why_not(dtype: torch.dtype) -> str | None:
    """None, or why this CPU has no such product."""
    wanted = {torch.float32: "avx512f", torch.bfloat16: "avx512bf16"}.get(dtype)
    if wanted is None:
        return f"it is for float32 and bfloat16, not for {str(dtype).removeprefix('torch.')}"
    return None if binding.get_host_cpu_features().get(wanted) else f"the CPU has no {wanted}"


def _panels(rows: int) -> bool:
    """Whether so many rows are whole panels, and as many as there are threads to share them."""
    threads = torch.get_num_threads()
    return rows % PANEL == 0 and rows // PANEL >= threads and (threads == 1 or has_team())


class VectorProduct:
    """x -> x W^T in float32, W and x float32 or bf16; W is copied in the order in which it is read."""

    def __init__(self, W: Tensor) -> None:
        self.rows, self.columns = W.shape
        self.pair = 4 // W.element_size()  # numbers that meet in one multiplication
        shape = (self.rows // PANEL, self.columns // self.pair, PANEL, self.pair)
        self.W = empty(shape, W.dtype, W.device)
        self.W.copy_(W.view(shape[0], PANEL, shape[1], self.pair).transpose(1, 2))

    @staticmethod
    def fits(W: Tensor) -> bool:
        """Whether W falls into panels, some for each thread."""
        return _panels(W.shape[0]) and W.shape[1] % (4 // W.element_size()) == 0 and why_not(W.dtype) is None

    def __call__(self, x: Tensor, bias: Tensor | None = None, y: Tensor | None = None) -> Tensor:
        """x W^T + bias, into y where it is given."""
        y = torch.empty(len(x), self.rows, dtype=torch.float32, device=x.device) if y is None else y
        code = _code(len(x) % LANES, self.pair == 2, bias is not None)
        more = 0 if bias is None else bias.data_ptr()
        code(self._threads(len(x)), x.data_ptr(), *self._rest(y), more)
        return y

    def _threads(self, lanes: int) -> int:
        work = lanes * self.rows * self.columns // self.pair
        return torch.get_num_threads() if work >= SHARED_FROM else 1

    def _rest(self, y: Tensor) -> tuple[int, ...]:
        return self.W.data_ptr(), y.data_ptr(), len(y), self.columns // self.pair, self.rows


class StepProduct:
    """The same for steps of so many lanes: each result lies where the one before it lay."""

    dtype = torch.float32

    def __init__(self, by_W: VectorProduct, lanes: int) -> None:
        self.by_W, self.kind = by_W, (lanes % LANES, by_W.pair == 2, False)
        self.y = torch.empty(lanes, by_W.rows, dtype=self.dtype, device=by_W.W.device)
        self.threads, self.rest = by_W._threads(lanes), (*by_W._rest(self.y), 0)

    def __call__(self, x: Tensor) -> Tensor:
        _code(*self.kind)(self.threads, x.data_ptr(), *self.rest)
        return self.y


def followed(kind: tuple[int, bool, bool], formula: Formula, operands: Mapping[str, Operand]) -> Code:
    """A product of that kind and a formula in one call: the arguments of both."""
    both = then(_product(*kind), ARGUMENTS, over(formula, operands))
    return Code(both, ARGUMENTS + 2 + len(operands))


@functools.cache
def _code(rest: int, bf16: bool, biased: bool) -> Code:
    """For any number of lanes that leaves this rest."""
    return Code(_product(rest, bf16, biased), ARGUMENTS)


def _product(rest: int, bf16: bool, biased: bool) -> Write:
    def write(b: ir.IRBuilder, given: list[ir.Value]) -> None:
        x, W, y = (b.inttoptr(v, POINTER) for v in given[:3])
        B, K, N = given[3:6]
        bias = b.inttoptr(given[6], POINTER)

        def tile(lane: ir.Value, panel: ir.Value, W_p: ir.Value, lanes: int) -> None:
            rows = [_at(b, x, b.mul(b.add(lane, INT(i)), K)) for i in range(lanes)]
            sums = _sums(b, rows, INT(1), W_p, K, bf16)
            column = b.mul(panel, INT(PANEL))
            more = _at(b, bias, column) if biased else None
            _put(b, sums, _at(b, y, b.add(b.mul(lane, N), column)), N, more, INT(0))

        with loop(b, *share(b, b.sdiv(N, INT(PANEL))), 1) as panel:
            W_p = _at(b, W, b.mul(panel, b.mul(K, INT(PANEL))))
            whole = b.sub(B, INT(rest))
            with loop(b, INT(0), whole, LANES) as lane:
                tile(lane, panel, W_p, LANES)
            if rest:
                tile(whole, panel, W_p, rest)

    return write


def gradient(dy: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """dW and db of y = x W^T + b, both operands (rows, ...) and float32."""
    threads = torch.get_num_threads()
    room = empty((threads, ROWS, PANEL + x.shape[1]), torch.float32, x.device)
    dW_T = empty((x.shape[1], dy.shape[1]), torch.float32, x.device).zero_()
    db, one = dy.new_zeros(dy.shape[1]), dy.new_ones(1)
    places = (v.data_ptr() for v in (x, dy, dW_T, room, db, one))
    _gradient_code()(threads, *places, len(x), x.shape[1], dy.shape[1])
    return empty((dy.shape[1], x.shape[1]), torch.float32, x.device).copy_(dW_T.T), db


def gradient_fits(dy: Tensor, x: Tensor) -> bool:
    """Whether the operands, float32 on a CPU, fall into tiles and the work is worth them."""
    if why_not(torch.float32) is not None:
        return False
    whole = x.shape[1] % LANES == 0 and _panels(dy.shape[1])
    return whole and x.is_contiguous() and dy.is_contiguous() and len(x) * x.shape[1] * dy.shape[1] >= LARGE


@functools.cache
def _gradient_code() -> Code:
    """In blocks of rows, of which each thread puts x and a panel of dy after the other in line first."""

    def write(b: ir.IRBuilder, given: list[ir.Value]) -> None:
        x, dy, dW_T, room, db, one = (b.inttoptr(v, POINTER) for v in given[:6])
        rows, width, N = given[6:]
        panel_room = _at(b, room, b.mul(thread(b), b.mul(b.add(width, INT(PANEL)), INT(ROWS))))
        x_room = _at(b, panel_room, INT(ROWS * PANEL))
        low, high = share(b, b.sdiv(N, INT(PANEL)))
        with loop(b, INT(0), b.sdiv(b.add(rows, INT(ROWS - 1)), INT(ROWS)), 1) as block:
            start = b.mul(block, INT(ROWS))
            left = b.sub(rows, start)
            count = b.select(b.icmp_signed("<", left, INT(ROWS)), left, INT(ROWS))
            with loop(b, INT(0), width, LANES) as lane:
                source = _at(b, x, b.add(b.mul(start, width), lane))
                _line_up(b, source, width, _at(b, x_room, b.mul(lane, INT(ROWS))), count, LANES)
            with loop(b, low, high, 1) as panel:
                column = b.mul(panel, INT(PANEL))
                _line_up(b, _at(b, dy, b.add(b.mul(start, N), column)), N, panel_room, count, PANEL)
                # db is the gradient of the weights of an input that is always one.
                db_sums = _sums(b, [one], INT(0), panel_room, count, bf16=False)
                _put(b, db_sums, _at(b, db, column), N, _at(b, db, column), N)
                with loop(b, INT(0), width, LANES) as lane:
                    first = b.mul(lane, INT(ROWS))
                    lanes = [_at(b, x_room, b.add(first, INT(i))) for i in range(LANES)]
                    place = _at(b, dW_T, b.add(b.mul(lane, N), column))
                    sums = _sums(b, lanes, INT(LANES), panel_room, count, bf16=False)
                    # A block's sum is added as one: over all rows one by one, rounding would add up.
                    _put(b, sums, place, N, place, N)

    return Code(write, 9)


def _line_up(
    b: ir.IRBuilder, source: ir.Value, stride: ir.Value, target: ir.Value, count: ir.Value, width: int
) -> None:
    """So many numbers of each row, one row after the other."""
    kind = ir.VectorType(FLOAT, width)
    with loop(b, INT(0), count, 1) as row:
        found = b.load(_at(b, source, b.mul(row, stride)), typ=kind, align=4)
        b.store(found, _at(b, target, b.mul(row, INT(width))), align=4)


def _at(b: ir.IRBuilder, base: ir.Value, index: ir.Value) -> ir.Value:
    return b.gep(base, [index], source_etype=FLOAT)


Sums = list[list[ir.Value]]


def _put(
    b: ir.IRBuilder,
    sums: Sums,
    base: ir.Value,
    stride: ir.Value,
    more: ir.Value | None,  # where what is to be added lies
    more_stride: ir.Value,
) -> None:
    def place(base: ir.Value, stride: ir.Value, lane: int, v: int) -> ir.Value:
        return _at(b, base, b.add(b.mul(INT(lane), stride), INT(v * WIDTH)))

    for i, of_lane in enumerate(sums):
        for v, value in enumerate(of_lane):
            if more is not None:
                value = b.fadd(b.load(place(more, more_stride, i, v), typ=_SUMS, align=4), value)
            b.store(value, place(base, stride, i, v), align=4)


def _sums(
    b: ir.IRBuilder,
    lanes: list[ir.Value],  # where each lane's numbers begin
    stride: ir.Value,  # from one of them to the next
    W_p: ir.Value,  # a panel
    K: ir.Value,
    bf16: bool,
) -> Sums:
    """Of some lanes with one panel."""
    before, body, after = b.block, b.append_basic_block(), b.append_basic_block()
    b.branch(body)
    b.position_at_end(body)
    k = b.phi(INT)
    k.add_incoming(INT(0), before)
    sums = [[b.phi(_SUMS) for _ in range(VECTORS)] for _ in lanes]
    weights = [
        b.load(_at(b, W_p, b.add(b.mul(k, INT(PANEL)), INT(v * WIDTH))), typ=_SUMS, align=64)
        for v in range(VECTORS)
    ]
    further, ends = b.add(k, INT(1)), []
    for lane, so_far in zip(lanes, sums, strict=True):
        number = _everywhere(b, b.load(_at(b, lane, b.mul(k, stride)), typ=FLOAT, align=4))
        ends.append([_multiply_add(b, number, W, y, bf16) for W, y in zip(weights, so_far, strict=True)])
        for y, end in zip(so_far, ends[-1], strict=True):
            y.add_incoming(ir.Constant(_SUMS, [0.0] * WIDTH), before)
            y.add_incoming(end, body)
    k.add_incoming(further, body)
    b.cbranch(b.icmp_signed("<", further, K), body, after)
    b.position_at_end(after)
    return ends


def _everywhere(b: ir.IRBuilder, number: ir.Value) -> ir.Value:
    """A vector of the same number; a pair of bf16 travels as one."""
    nothing = ir.Constant(_SUMS, ir.Undefined)
    first = b.insert_element(nothing, number, WORD(0))
    return b.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(WORD, WIDTH), [0] * WIDTH))


def _multiply_add(b: ir.IRBuilder, x: ir.Value, W: ir.Value, sum_: ir.Value, bf16: bool) -> ir.Value:
    if bf16:
        kind: ir.Type = ir.VectorType(_BFloat(), 2 * WIDTH)
        f = _declared(b, "llvm.x86.avx512bf16.dpbf16ps.512", [_SUMS, kind, kind])
        return b.call(f, [sum_, b.bitcast(x, kind), b.bitcast(W, kind)])
    return b.call(_declared(b, "llvm.fma.v16f32", [_SUMS] * 3), [x, W, sum_])


def _declared(b: ir.IRBuilder, name: str, arguments: list[ir.Type]) -> ir.Function:
    known = b.module.globals.get(name)
    return known or ir.Function(b.module, ir.FunctionType(_SUMS, arguments), name)
