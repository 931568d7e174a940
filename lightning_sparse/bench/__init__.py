"""What can be examined and timed on a user's own machines. Functions return findings and rows, and print nothing."""
