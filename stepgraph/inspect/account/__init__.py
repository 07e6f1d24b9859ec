"""``stepgraph inspect``: the account of a step as plain data, and the page that shows it."""
