"""The interface between the operations of the kernels and the backends that execute them.

Kernels are written with registers, predicates, loops, PTX instructions and launches. A backend
implements each of these. `Mosaic` builds MLIR for a GPU. The tests have a second backend that
runs all threads of a grid in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from jax import Array

from kvjax.kernels_pallas.simt.caching import bypass_cache
from kvjax.kernels_pallas.simt.mosaic import Mosaic
from kvjax.kernels_pallas.simt.types import Arithmetic, Comparison, Launch, Value


class Backend(Protocol):
    """The operations that `kvjax.kernels_pallas.simt` is built on. Numbers are unsigned, of 32
    or 64 bits.
    """

    def constant(self, x: int, bits: int = 32) -> Value: ...

    def arithmetic(self, op: Arithmetic, a: Value, b: Value) -> Value:
        """`a op b` for two numbers of equal width, or for two predicates."""

    def compare(self, op: Comparison, a: Value, b: Value) -> Value: ...

    def select(self, flag: Value, yes: Value, no: Value) -> Value: ...

    def extend(self, x: Value) -> Value:
        """A number of 32 bits as one of 64."""

    def address(self, ref: Any, bits: int) -> Value:
        """The address of a ref in device memory (64 bits) or in the block's shared memory (32
        bits).
        """

    def ptx(
        self, code: str, values: Sequence[Value], results: int, convergent: bool
    ) -> Sequence[Value]:
        """Runs PTX in which $0, $1, ... are the results and then the values."""

    def when(self, flag: Value) -> AbstractContextManager[None]:
        """Runs the block in the threads whose flag is true."""

    def loop(
        self,
        start: Value,
        stop: Value,
        step: Value,
        carry: Sequence[Value],
        body: Callable[..., Sequence[Value]],
    ) -> Sequence[Value]:
        """carry = body(i, *carry) for i in range(start, stop, step)."""

    def repeat(
        self, carry: Sequence[Value], body: Callable[..., tuple[Value, Sequence[Value]]]
    ) -> Sequence[Value]:
        """again, carry = body(*carry) once, and then while `again` is true."""

    def branch(
        self, flag: Value, make: Callable[[], Sequence[Value]], otherwise: Sequence[Value]
    ) -> Sequence[Value]: ...

    def run(
        self, program: Callable[..., None], launch: Launch, out_type: Any, args: Sequence[Array]
    ) -> Any:
        """The outputs of program(*inputs, *outputs, *scratch)."""

    def run_in_place(
        self,
        program: Callable[..., None],
        launch: Launch,
        changed: Sequence[Array],
        args: Sequence[Array],
    ) -> tuple[Array, ...]:
        """`changed` after program(*changed, *args, *scratch)."""


_backend: ContextVar[Backend] = ContextVar("_backend", default=Mosaic())  # noqa: B039 (it has no state)
_launch: ContextVar[Launch] = ContextVar("_launch")


def backend() -> Backend:
    """The backend in use here: Mosaic, unless `use` names another."""
    return _backend.get()


@contextmanager
def use(other: Backend) -> Iterator[None]:
    """In the block, kernels run on `other`, and nothing that was traced for another backend is
    used again.
    """
    token = _backend.set(other)
    try:
        with bypass_cache():
            yield
    finally:
        _backend.reset(token)


def traced(program: Callable[..., None], launch: Launch) -> Callable[..., None]:
    """The program of a launch, whose words may ask `has_cluster` while it is traced."""

    def run(*refs: Any) -> None:
        token = _launch.set(launch)
        try:
            program(*refs)
        finally:
            _launch.reset(token)

    return run


def has_cluster() -> bool:
    """True if the kernel that is traced here has clusters of more than one block. In any other
    kernel the words of a cluster are those of a block, so that a GPU without clusters can run
    it."""
    return (_launch.get().cluster or 1) > 1


def parts() -> int:
    """The number of blocks that share a row in the kernel that is traced here, without a
    cluster.
    """
    return _launch.get().parts
