"""What a rank of a pipeline captures: the part of a step that is its own."""
