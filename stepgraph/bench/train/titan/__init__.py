"""torchtitan as a provider of ``stepgraph bench train``: its public ``Trainer``, configured for our work.

torchtitan is imported where it is used, so that everything else works without it. What it is given: a job
configuration, model arguments with the preset's dimensions, our tokens and our initial weights, and a metrics processor
that reads a loss only when it is asked for one. The model, its parallelism, its compilation, its optimizer and its step
are torchtitan's own.
"""
