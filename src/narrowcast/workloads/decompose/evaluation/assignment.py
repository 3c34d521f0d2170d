"""The assignment of rows to columns that is worth most, exactly: the Hungarian method."""

import numpy as np
from numpy.typing import NDArray


def best_assignment(worth: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each row the column of its own that makes the sum of their worths the largest.

    A matrix of more rows than columns leaves rows without one: their column is -1. By shortest
    augmenting paths, a row at a time, each in as many vector operations as there are rows.
    """
    rows, columns = worth.shape
    if rows > columns:
        # Columns are given out among rows instead.
        matched_rows = best_assignment(np.ascontiguousarray(worth.T))
        matched_columns = np.full(rows, -1)
        matched_columns[matched_rows] = np.arange(columns)
        return matched_columns
    cost = -worth
    row_price, column_price = np.zeros(rows), np.zeros(columns + 1)
    # The column after the last is where a path begins; it holds the row that is being placed.
    row_at = np.full(columns + 1, -1)
    for row in range(rows):
        row_at[columns] = row
        here = columns
        distance, came_from = np.full(columns, np.inf), np.full(columns, columns)
        seen = np.zeros(columns + 1, dtype=bool)
        while row_at[here] != -1:
            seen[here] = True
            at = row_at[here]
            reduced = cost[at] - row_price[at] - column_price[:columns]
            nearer = ~seen[:columns] & (reduced < distance)
            distance[nearer], came_from[nearer] = reduced[nearer], here
            open_distance = np.where(seen[:columns], np.inf, distance)
            here = int(open_distance.argmin())
            step = open_distance[here]
            row_price[row_at[seen]] += step
            column_price[seen] -= step
            distance[~seen[:columns]] -= step
        while here != columns:
            before = came_from[here]
            row_at[here], here = row_at[before], before
    matched_columns = np.empty(rows, dtype=np.int64)
    placed = np.flatnonzero(row_at[:columns] != -1)
    matched_columns[row_at[placed]] = placed
    return matched_columns
