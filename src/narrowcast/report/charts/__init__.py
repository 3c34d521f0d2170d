"""What a page draws: charts as plotly's data, and the series under them."""
