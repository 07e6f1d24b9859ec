"""What operators around a norm compute, as polynomials: two graphs that compute the same give the same polynomial.

A row is the last dimension of the tensor ``x`` that is normalized. A polynomial is a sum of monomials with a number in
front; a monomial is a product of factors, each with an exponent:

    ("full", node)           a tensor of the shape of x: x itself, a gradient
    ("column", node)         the same in every row: a weight, a bias
    ("mean", monomial)       the mean of a monomial over its row: one value per row
    ("root", polynomial)     a sum of values per row, to be taken to a power that is not a natural number
    ("sum", dims, monomial)  the sum of a monomial over all rows, or over those dimensions of them

Means and sums are linear, and what is the same all along a row leaves a mean, so that
``mean((x - mean(x)) ** 2)`` and ``mean(x ** 2) - mean(x) ** 2`` are one polynomial. Roundings and casts are not seen.
"""

import math
from collections.abc import Hashable

Factor = tuple[Hashable, ...]
Monomial = frozenset[tuple[Factor, float]]
Polynomial = dict[Monomial, float]

ONE: Monomial = frozenset()

#: Coefficients come from division by row lengths; this is far above their rounding and far below any real difference.
_TOLERANCE = 1e-9


class NotAlgebra(Exception):
    """The result is not a polynomial in the factors above."""


def constant(value: float) -> Polynomial:
    """A number."""
    return {ONE: float(value)} if value else {}


def factor(*key: Hashable) -> Polynomial:
    """A single factor."""
    return {frozenset({(key, 1.0)}): 1.0}


def add(a: Polynomial, b: Polynomial, scale: float = 1.0) -> Polynomial:
    """``a + scale * b``; what cancels is left out."""
    result = dict(a)
    for monomial, coefficient in b.items():
        _put(result, monomial, scale * coefficient)
    return result


def _put(result: Polynomial, monomial: Monomial, coefficient: float) -> None:
    """Add a term to ``result`` itself."""
    old = result.pop(monomial, 0.0)
    new = old + coefficient
    if abs(new) > _TOLERANCE * max(abs(old), abs(coefficient)):
        result[monomial] = new


def multiply(a: Polynomial, b: Polynomial) -> Polynomial:
    """``a * b``."""
    result: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            _put(result, _product(left, right), x * y)
    return result


def _product(a: Monomial, b: Monomial) -> Monomial:
    powers = dict(a)
    for key, exponent in b:
        powers[key] = powers.get(key, 0.0) + exponent
    return frozenset((key, exponent) for key, exponent in powers.items() if exponent)


def power(a: Polynomial, exponent: float) -> Polynomial:
    """``a ** exponent``. Raises `NotAlgebra` where that is neither a polynomial nor a root of values per row."""
    if exponent == int(exponent) and 0 <= exponent <= 4:
        result = constant(1)
        for _ in range(int(exponent)):
            result = multiply(result, a)
        return result
    if len(a) == 1:
        ((monomial, coefficient),) = a.items()
        if coefficient > 0:
            return {frozenset((key, e * exponent) for key, e in monomial): coefficient**exponent}
    elif a and is_per_row(a):
        return {frozenset({(("root", frozenset(a.items())), float(exponent))}): 1.0}
    raise NotAlgebra


def _is_row_factor(key: Factor) -> bool:
    return key[0] in ("mean", "root")


def is_per_row(a: Polynomial) -> bool:
    """Whether all along a row the value is the same."""
    return all(_is_row_factor(key) for monomial in a for key, _ in monomial)


def row_mean(a: Polynomial) -> Polynomial:
    """The mean over each row."""
    result: Polynomial = {}
    for monomial, coefficient in a.items():
        outside = frozenset((key, e) for key, e in monomial if _is_row_factor(key))
        inside = monomial - outside
        mean = {frozenset({(("mean", inside), 1.0)}): 1.0} if inside else constant(1)
        for rest, x in mean.items():
            _put(result, _product(outside, rest), coefficient * x)
    return result


def column_sum(a: Polynomial, dims: tuple[int, ...]) -> Polynomial:
    """The sum over the dimensions ``dims`` of the rows."""
    result: Polynomial = {}
    for monomial, coefficient in a.items():
        _put(result, frozenset({(("sum", dims, monomial), 1.0)}), coefficient)
    return result


def same(a: Polynomial, b: Polynomial) -> bool:
    """Whether two polynomials are equal except for the rounding of their coefficients."""
    return a.keys() == b.keys() and all(math.isclose(a[m], b[m], rel_tol=1e-6) for m in a)


def keys(a: Polynomial, kind: str) -> set[Hashable]:
    """The nodes behind the factors of a kind, those inside means and sums among them."""
    found: set[Hashable] = set()
    for monomial in a:
        _collect(monomial, kind, found)
    return found


def _collect(monomial: Monomial, kind: str, found: set[Hashable]) -> None:
    for key, _ in monomial:
        if key[0] == kind:
            found.add(key[1])
        if key[0] in ("mean", "sum"):
            _collect(key[-1], kind, found)
