"""golf: the small fast transformer of pytorch issue 179423."""
