"""The options of a run, the presets, and how they become model, optimizer and step."""
