"""The formats of ``--data``: text, JSON lines, parquet and data sets of Hugging Face, all read lazily."""
