"""Selectors: which stored tokens a query needs, estimated from an index that is much smaller
than the keys.

A selector indexes keys as they leave the recent block, and scores units of `unit` tokens (1, or
a page) for a query. Scores estimate scale * q.k, so that they can be compared with the exact
scores of pending tokens. `select` reduces them over the GQA group and selects; some selectors
do both in one kernel.
"""

from kvjax.selectors.exact import Exact
from kvjax.selectors.fier import Fier
from kvjax.selectors.pages import CentrePages, MinMaxPages
from kvjax.selectors.paris import Paris
from kvjax.selectors.planes import SignPlane
from kvjax.selectors.prefixed import PrefixedSelector
from kvjax.selectors.selector import Candidates, Selector

__all__ = [
    "Candidates",
    "CentrePages",
    "Exact",
    "Fier",
    "MinMaxPages",
    "Paris",
    "PrefixedSelector",
    "Selector",
    "SignPlane",
]
