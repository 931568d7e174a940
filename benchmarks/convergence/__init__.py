"""Accuracy and loss of methods that send little, at equal steps and at equal time."""
