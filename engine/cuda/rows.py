"""The number of rows up to which a pass on a GPU uses the narrow kernels."""

NARROW_ROWS = 16
"""The most rows of the *narrow* kernels of products, attention, delta nets and storing, which compute all rows of a pass at
once: 16 are the rows of a tile of tensor cores.  A pass of more rows uses *wide* kernels, or narrow ones for some of its rows
at a time.  Which kernels a pass uses follows from its number of rows alone, not from what it is for."""


def groups(rows: int, most: int) -> list[slice]:
    """The rows of the launches of a kernel that takes ``most`` of the ``rows`` rows, which are no fewer, at a time.  The last
    group overlaps the one before it, so that all use the same kernel."""
    return [slice(first, first + most) for first in (*range(0, rows - most, most), rows - most)]
