"""What doubt about the Gram form leaves in a matrix's state. Without torch: checkpoints are judged by it."""

DISTRUSTED = "distrusted"
"""In the state of a matrix, so that checkpoints remember it: how many of its next updates are in standard form. Older
checkpoints have True."""
