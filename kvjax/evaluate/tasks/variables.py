"""Variable chains: a number is assigned from variable to variable, and a cache must keep every
link.

**Source:** variable tracking of RULER (Hsieh et al. 2024), written from its description.
"""

from __future__ import annotations

import random

from kvjax.evaluate.tasks.haystack import WORDS, Hidden, draw_numbers
from kvjax.spec import require_int


def variables(rng: random.Random, *, chains: int = 1, hops: int = 2) -> Hidden:
    """`chains` numbers, each passed on `hops` times from variable to variable; the question is
    a last variable's value.

    **Differs:** RULER asks for all variables of a value, as `assigned_variables` does; here one
    value is asked for, so that an answer is one number whatever the number of hops.

    >>> made = variables(random.Random(0), chains=1, hops=1)
    >>> made.lines, made.question, made.answers
    (('VAR plate = 15306', 'VAR rocket = plate'), 'The value of rocket is ', ('15306',))
    """
    lines, names, values, order = _chains(rng, chains, hops, where="variables")
    asked = rng.randrange(chains)
    question = f"The value of {names[asked * (hops + 1) + hops]} is "
    holding = tuple(line for line, chain in enumerate(order) if chain == asked)
    return Hidden(lines, question, (values[asked],), {"chains": chains, "hops": hops}, holding)


def assigned_variables(rng: random.Random, *, chains: int = 1, hops: int = 4) -> Hidden:
    """`chains` numbers, each passed on `hops` times; all variables that have one of the numbers
    are asked for.

    >>> made = assigned_variables(random.Random(0), chains=1, hops=1)
    >>> made.question
    'Which variables have the value 15306? The 2 variables with the value 15306 are: '
    >>> made.answers
    ('plate', 'rocket')
    """
    lines, names, values, order = _chains(rng, chains, hops, where="assigned_variables")
    asked = rng.randrange(chains)
    answers = tuple(names[asked * (hops + 1) : (asked + 1) * (hops + 1)])
    value = values[asked]
    one = (
        f"The {hops + 1} variables with the value {value} are: "
        if hops
        else "The variable with it is: "
    )
    holding = tuple(line for line, chain in enumerate(order) if chain == asked)
    question = f"Which variables have the value {value}? {one}"
    return Hidden(lines, question, answers, {"chains": chains, "hops": hops}, holding)


def _chains(
    rng: random.Random, chains: int, hops: int, *, where: str
) -> tuple[tuple[str, ...], list[str], list[str], list[int]]:
    """Lines, names by chain, the value of each chain, and the chain of each line."""
    require_int(f"{where}(chains=...)", chains, at_least=1)
    require_int(f"{where}(hops=...)", hops, at_least=0)
    require_int(
        f"{where}(chains * (hops + 1))", chains * (hops + 1), at_least=1, at_most=len(WORDS)
    )
    names = rng.sample(WORDS, chains * (hops + 1))
    values = draw_numbers(rng, chains)
    pending = []
    for i, value in enumerate(values):
        own = names[i * (hops + 1) : (i + 1) * (hops + 1)]
        pending.append(
            [f"VAR {name} = {of}" for name, of in zip(own, (value, *own), strict=False)]
        )
    order = [i for i, chain in enumerate(pending) for _ in chain]
    rng.shuffle(order)  # chains mix, and each keeps its order
    return tuple(pending[i].pop(0) for i in order), names, values, order
