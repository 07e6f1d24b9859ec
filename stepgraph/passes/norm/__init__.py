"""The norm pass: finds norms by what they compute and picks the fastest way for each."""
