"""Any callable as a model: a pytree, which `jit` takes as an argument.

A model is data and code. A pytree, such as an nnx module or `jax.tree_util.Partial`, stays as it
is. In other callables, arrays that can be told from the code are leaves:

- the arguments of a `functools.partial`, such as `partial(module.apply, variables)` of Linen;
- the variables of a bound Linen module, `module.bind(variables)`;
- the object of a bound method, if it is a pytree.

Whatever a function closes over is a part of its code. It is compiled in, and another function, even
of the same text, compiles again; so weights belong in a `partial`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
from jax.tree_util import register_pytree_node_class

DECLARED = ("config", "max_positions")  # what a model may say of itself


class Code:
    """A static part of a model. One without a hash, such as an object with arrays, equals itself
    alone.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self._hash: int | None = None
        with suppress(TypeError):
            self._hash = hash(value)

    def __hash__(self) -> int:
        return id(self.value) if self._hash is None else self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Code):
            return False
        same = self.value is other.value
        return same or (self._hash is not None and bool(self.value == other.value))


@register_pytree_node_class
class Called:
    """`function`, called with arguments of its own before those of a call.

    It declares what the callable that a user gave declares of itself.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Any = (),
        settings: Any = None,
        given: Any = None,
    ) -> None:
        self.function = function
        self.args = args
        self.settings = {} if settings is None else settings
        self.given = function if given is None else given

    def __call__(self, *args: Any, **settings: Any) -> Any:
        return self.function(*self.args, *args, **{**self.settings, **settings})

    def __getattr__(self, name: str) -> Any:
        if name not in DECLARED:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.given, name)

    def tree_flatten(self) -> tuple[list[Any], Any]:
        leaves, tree = jax.tree.flatten((self.args, self.settings))
        data = [leaf for leaf in leaves if _is_array(leaf)]
        code = tuple(None if _is_array(leaf) else Code(leaf) for leaf in leaves)
        return data, (Code(self.function), Code(self.given), tree, code)

    @classmethod
    def tree_unflatten(cls, aux: Any, data: Any) -> Called:
        function, given, tree, code = aux
        left = iter(data)
        leaves = [next(left) if part is None else part.value for part in code]
        args, settings = jax.tree.unflatten(tree, leaves)
        return cls(function.value, args, settings, given.value)


def as_model(model: Any) -> Any:
    """`model` as a pytree; what is one already, or cannot be called, is returned as it is.

    >>> import numpy as np
    >>> from functools import partial
    >>> made = as_model(partial(lambda weights, tokens: weights @ tokens, np.ones((2, 3))))
    >>> [leaf.shape for leaf in jax.tree.leaves(made)], made(np.ones(3)).tolist()
    ([(2, 3)], [3.0, 3.0])
    """
    if not callable(model) or isinstance(model, type) or not jax.tree_util.all_leaves([model]):
        return model
    if isinstance(model, functools.partial):
        return Called(model.func, model.args, model.keywords)
    # A bound module of Linen.
    if getattr(model, "scope", None) is not None and hasattr(model, "unbind"):
        module, variables = model.unbind()
        return Called(_apply, (module, variables), given=module)
    owner = getattr(model, "__self__", None)
    if inspect.ismethod(model) and not jax.tree_util.all_leaves([owner]):
        return Called(model.__func__, (owner,), given=owner)
    return Called(model)


def _apply(module: Any, variables: Any, *args: Any, **settings: Any) -> Any:
    return module.apply(variables, *args, **settings)


def _is_array(leaf: Any) -> bool:
    """True for arrays and their shapes; numbers and flags of Python are a part of the code."""
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")
