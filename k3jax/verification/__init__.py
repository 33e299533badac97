"""A checkpoint against stored outputs, or against itself."""
