"""Sets of names written as text."""


def words(text: str) -> frozenset[str]:
    """The words of a text.

    >>> sorted(words("exp log"))
    ['exp', 'log']
    """
    return frozenset(text.split())
