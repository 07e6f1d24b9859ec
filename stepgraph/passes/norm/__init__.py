"""The norm pass: finds norms by what they compute and picks the fastest kernel for each."""
